"""What the demo shows and writes: a text table, a figure (accuracy and KV bytes against budget) and the JSON record."""

from __future__ import annotations

import importlib.util
import io
import os
import pathlib
import tempfile
from typing import Any

from experiments import record

_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#6b4c9a",
    "#8c564b",
)  # colour-blind safe
_MARKERS = "osD^vPX*"


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
        result: what `experiments.demo.run` returns.

    Returns:
        A PNG file's bytes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = result["settings"]
    full, *others = result["metrics"]
    swept = [m for m in others if m["budget_tokens"]]
    budgets = sorted({(m["budget_tokens"], m["budget"]) for m in swept})
    figure = Figure(figsize=(12.5, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3)
    series = (
        ("accuracy, %", lambda m: m["value"]),
        ("KV bytes resident per question, MB", lambda m: m["kv_bytes_per_row"] / 1e6),
        ("bytes read per decode step, MB", lambda m: m["bytes_read_per_step_per_row"] / 1e6),
    )
    for panel, (label, read) in zip(panels, series, strict=True):
        panel.axhline(read(full), color="#333333", linestyle="--", linewidth=1.4, label="full")
        for index, name in enumerate(dict.fromkeys(m["method"] for m in swept)):
            points = sorted((m["budget_tokens"], read(m)) for m in swept if m["method"] == name)
            panel.plot(
                *zip(*points, strict=True),
                color=_COLORS[index % len(_COLORS)],
                marker=_MARKERS[index % 8],
                markersize=6.5,
                linewidth=1.8,
                alpha=0.85,
                label=name,
            )
        panel.set_title(label, fontsize=11)
        panel.set_xlabel("budget per KV head, tokens")
        if budgets:
            panel.set_xscale("log", base=2)
            panel.set_xticks(
                [tokens for tokens, _ in budgets],
                [f"{tokens}\n({share})" if "/" in share else str(tokens) for tokens, share in budgets],
            )
            panel.minorticks_off()
            panel.set_xlim(budgets[0][0] / 1.25, budgets[-1][0] * 1.25)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_ylim(-4, 104)
    panels[0].set_yticks(range(0, 101, 20))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"{', '.join(settings['tasks'])} at {settings['length']} tokens "
        f"({full['samples']} answers per point, {settings['model']} model, {settings['dtype']})",
        fontsize=12,
    )
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def write_bytes(path: pathlib.Path, data: bytes) -> None:
    """Writes a file atomically: it is complete or not there. Its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(name, 0o644)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        pathlib.Path(name).unlink(missing_ok=True)
        raise


def table(result: dict[str, Any]) -> str:
    """The record as a text table."""
    head = (
        "method",
        "budget",
        "question",
        "accuracy",
        "of Full",
        "agree",
        "attended",
        "KV MB",
        "read MB",
        "tokens/s",
        "prefill s",
        "compile s",
        "",
    )
    lines = [head]
    for m in result["metrics"]:
        budget = f"{m['budget']} = {m['budget_tokens']}" if "/" in m["budget"] else m["budget"]
        lines.append(
            (
                m["method"],
                budget or "all",
                {"prefill": "in prompt", "extend": "after"}[m["question"]],
                f"{m['value']:.1f} %",
                "-" if m["percent_of_full"] is None else f"{m['percent_of_full']:.0f} %",
                f"{m['agreement_percent']:.0f} %",
                f"{m['attended_tokens']:.0f}",
                f"{m['kv_bytes_per_row'] / 1e6:.2f}",
                f"{m['bytes_read_per_step_per_row'] / 1e6:.2f}",
                f"{m['tokens_per_second']:.1f}",
                f"{m['read_seconds_per_context']:.2f}",
                f"{m['compile_seconds']:.1f}",
                "no effect at this length" if m["no_effect"] else "",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    rows = [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line[:-1], widths, strict=False))
        )
        + f"  {line[-1]}".rstrip()
        for line in lines
    ]
    s = result["settings"]
    count = result["metrics"][0]["samples"]
    return "\n".join(
        [
            f"{', '.join(s['tasks'])}: {count} answers from {s['samples'] * len(s['tasks'])} contexts of {s['length']} tokens, "
            f"{s['model']} model, {s['dtype']} on {result['device']['kind']}",
            rows[0],
            "-" * max(map(len, rows)),
            *rows[1:],
            "agree: answers equal to Full's, token by token; KV MB resident and MB read per step are per question; prefill s is "
            "per context",
            f"{result['wall_seconds']:.0f} s in all, {result['compile_seconds']:.0f} s of it compiling",
        ]
    )


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
    image = (
        draw(result) if len(files) > 1 else None
    )  # before anything is written, so that errors leave nothing
    record.write_record(files[0], result)
    if image is not None:
        write_bytes(files[1], image)
