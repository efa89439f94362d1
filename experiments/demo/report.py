"""What the demo shows and writes: a table, a figure of accuracy and KV bytes by budget, the JSON record."""

from __future__ import annotations

import importlib.util
import io
import pathlib
from typing import Any

from experiments.records import record

_HEAD = (
    "method", "budget", "question", "accuracy", "of Full", "agree", "attended", "KV MB", "read MB",
    "tokens/s", "read s", "compile s", "",
)  # fmt: skip
_LEGEND = (
    "question: in the prompt, before compression, or after it (context prefilled once, then forked)",
    "agree: answers equal to Full's token by token; attended: tokens per decode step; KV MB: resident,",
    "read MB: per decode step, both per question; read s: reading a context and its questions",
)
# Okabe and Ito's palette, which colour-blind readers can tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")


def check_installed() -> None:
    """Raises ModuleNotFoundError, naming the extra, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "figures need the package 'matplotlib', which is not installed; install the extra 'plot' "
            "(pip install 'kvjax[plot]') or pass --no-plot"
        )


def draw(result: dict[str, Any]) -> bytes:
    """Draws the record of a demo.

    Args:
        result: what `experiments.demo.run.run` returns.

    Returns:
        A PNG file's bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = result["settings"]
    full, *swept = result["metrics"]
    budgets = sorted({(m["budget_tokens"] or 0, m["budget"]) for m in swept})
    names = list(dict.fromkeys(m["method"] for m in swept))
    figure = Figure(figsize=(13, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    series = (
        ("accuracy, %", lambda m: m["value"], "%.0f"),
        ("KV bytes resident per question, MB", lambda m: m["kv_bytes_per_row"] / 1e6, "%.1f"),
        ("bytes read per decode step, MB", lambda m: m["bytes_read_per_step_per_row"] / 1e6, "%.1f"),
    )
    width = 0.84 / max(1, len(names))
    for panel, (title, read, style) in zip(panels, series, strict=True):
        panel.axhline(read(full), color="#333333", linestyle="--", linewidth=1.3, label="full", zorder=3)
        for index, name in enumerate(names):
            mine = [m for m in swept if m["method"] == name]
            at = [budgets.index((m["budget_tokens"] or 0, m["budget"])) for m in mine]
            shifted = [x + (index - (len(names) - 1) / 2) * width for x in at]
            bars = panel.bar(
                shifted, [read(m) for m in mine], 0.92 * width, color=COLORS[index % 7], label=name, zorder=2
            )
            panel.bar_label(bars, fmt=style, fontsize=7.5, padding=1.5)
        panel.set_title(title, fontsize=11)
        panel.set_xlabel("budget, tokens per KV head")
        panel.set_xticks(range(len(budgets)), [_label(share, tokens) for tokens, share in budgets])
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylim(0, 110)
    panels[0].set_yticks(range(0, 101, 20))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    about = f"{full['samples']} answers a bar, {settings['model']} model, {settings['dtype']}"
    figure.suptitle(f"{', '.join(settings['tasks'])} at {settings['length']} tokens ({about})", fontsize=12)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _label(share: str, tokens: int | None) -> str:
    """A budget as the user gave it, in tokens too if that was a share."""
    return (share or "all") if not tokens or share == str(tokens) else f"{share} = {tokens}"


def table(result: dict[str, Any]) -> str:
    """The record as a text table."""
    lines = [_HEAD]
    for m in result["metrics"]:
        cells = (
            m["method"], _label(m["budget"], m["budget_tokens"]),
            {"prefill": "in prompt", "extend": "after"}[m["question"]], f"{m['value']:.1f} %",
            "-" if m["percent_of_full"] is None else f"{m['percent_of_full']:.0f} %",
            f"{m['agreement_percent']:.0f} %", f"{m['attended_tokens']:.0f}",
            f"{m['kv_bytes_per_row'] / 1e6:.2f}", f"{m['bytes_read_per_step_per_row'] / 1e6:.2f}",
            f"{m['tokens_per_second']:.0f}",
            f"{m['read_seconds_per_context']:.2f}", f"{m['compile_seconds']:.1f}",
            "no effect at this length" if m["no_effect"] else "",
        )  # fmt: skip
        lines.append(cells)
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    rows = [
        "  ".join(
            cell.ljust(width) if column in (0, 1, 2, 12) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    s = result["settings"]
    contexts = len(s["prompt_tokens"])
    title = (
        f"{', '.join(s['tasks'])}: {result['metrics'][0]['samples']} answers from {contexts} "
        f"context{'s' * (contexts > 1)} of {s['length']} tokens, {s['model']} model, {s['dtype']} on "
        f"{result['device']['kind']}"
    )
    times = f"{result['wall_seconds']:.0f} s in all, {result['compile_seconds']:.0f} s of it compiling"
    return "\n".join([title, rows[0], "-" * max(map(len, rows)), *rows[1:], *_LEGEND, times])


def output_files(directory: pathlib.Path, plot: bool) -> list[pathlib.Path]:
    """The files a demo writes: the record, then the figure.

    Raises:
        ValueError: ``directory`` is a file.
        ModuleNotFoundError: a figure is wanted and matplotlib is not installed.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--out must be a directory, got the file {directory}")
    if plot:
        check_installed()
    return [directory / "demo.json", directory / "demo.png"][: 1 + plot]


def write(result: dict[str, Any], files: list[pathlib.Path]) -> None:
    """Writes the record and the figure, each complete or not at all; see `output_files`."""
    image = draw(result) if len(files) > 1 else None  # before any file exists, so that errors leave none
    record.write_record(files[0], result)
    if image is not None:
        record.write_bytes(files[1], image)
