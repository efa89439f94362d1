"""The table of a demo, and its figure of accuracy and bytes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from experiments.records import COLORS, REFERENCE, method_title, new_figure, tidy

_HEAD = (
    "method", "budget", "question", "accuracy", "of Full", "agree", "attended", "KV MB", "read MB",
    "tokens/s", "read s", "compile s", "",
)  # fmt: skip
_LEFT = (0, 1, 2, 12)  # columns of text, which begin at the left
_LEGEND = (
    "question: in the prompt, before compression, or after it (context prefilled once, then forked)",
    "agree: answers equal to Full's; attended: tokens per decode step; KV MB: resident, read MB: per decode",
    "step, both per question; read s: reading a context and its questions",
)
_PANELS: tuple[tuple[str, Callable[[Mapping[str, Any]], float], str], ...] = (
    ("accuracy, %", lambda m: m["value"], "{:.0f}"),
    ("KV bytes resident per question, MB", lambda m: m["kv_bytes_per_row"] / 1e6, "{:.1f}"),
    ("bytes read per decode step, MB", lambda m: m["bytes_read_per_step_per_row"] / 1e6, "{:.1f}"),
)


def figures(result: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the only figure of a demo's record, by name, for `experiments.cli.plot`."""
    return {"demo": functools.partial(draw, result)}, ["demo"]


def draw(result: Mapping[str, Any]) -> Any:
    """Draw a demo's record: a bar for each row of the table; the dashed line is Full."""
    settings, metrics = result["settings"], result["metrics"]
    methods = list(dict.fromkeys(m["method"] for m in metrics if m["method"] != "full"))
    names = ["Full" if m["method"] == "full" else f"{method_title(m['method'])} {_label(m)}" for m in metrics]
    colors = [REFERENCE if m["method"] == "full" else COLORS[methods.index(m["method"]) % len(COLORS)] for m in metrics]
    figure = new_figure(11, 1.3 + 0.27 * len(metrics))
    panels = figure.subplots(1, len(_PANELS), sharey=True)
    for panel, (title, read, shown) in zip(panels, _PANELS, strict=True):
        values = [read(m) for m in metrics]
        bars = panel.barh(range(len(metrics)), values, height=0.72, color=colors)
        white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}  # keeps the dashed line out of the numbers
        panel.bar_label(bars, [shown.format(value) for value in values], fontsize=8, padding=2.5, bbox=white)
        panel.axvline(values[0], color=REFERENCE, linestyle="--", linewidth=1, zorder=0)
        panel.set_xlim(0, 1.15 * max(*values, 1e-9))
        tidy(panel, "", title, grid="x")
    panels[0].set_xlim(0, 115)
    panels[0].set_xticks(range(0, 101, 25))
    panels[0].set_yticks(range(len(metrics)), names)
    panels[0].invert_yaxis()
    about = f"{metrics[0]['samples']} answers a bar, {settings['model']} model, {settings['dtype']}"
    figure.suptitle(f"{', '.join(settings['tasks'])} at {settings['length']:,} tokens ({about})", fontsize=11)
    return figure


def _label(metric: Mapping[str, Any]) -> str:
    """Format a budget as the user gave it, and in tokens if the user gave a share; without one, the tokens attended."""
    share, tokens = metric["budget"], metric["budget_tokens"]
    if not tokens:
        return "all" if metric["method"] == "full" else f"{metric['attended_tokens']:.0f}"
    return share if share == str(tokens) else f"{share} = {tokens}"


def table(result: Mapping[str, Any]) -> str:
    """Format a demo's record as a text table."""
    lines = [_HEAD]
    for m in result["metrics"]:
        cells = (
            method_title(m["method"]), _label(m),
            {"prefill": "in prompt", "extend": "after"}[m["question"]], f"{m['value']:.1f} %",
            "-" if m["percent_of_full"] is None else f"{m['percent_of_full']:.0f} %",
            f"{m['agreement_percent']:.0f} %", f"{m['attended_tokens']:.0f}",
            f"{m['kv_bytes_per_row'] / 1e6:.2f}", f"{m['bytes_read_per_step_per_row'] / 1e6:.2f}",
            f"{m['tokens_per_second']:.0f}",
            f"{m['read_seconds_per_context']:.2f}", f"{m['compile_seconds']:.1f}",
            "no effect at this length" if m["no_effect"] else "",
        )  # fmt: skip
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        "  ".join(
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    settings, contexts = result["settings"], result["settings"]["samples"] * len(result["settings"]["tasks"])
    title = (
        f"{', '.join(settings['tasks'])}: {result['metrics'][0]['samples']} answers from {contexts} "
        f"context{'s' * (contexts > 1)} of {settings['length']} tokens, {settings['model']} model, {settings['dtype']} on "
        f"{result['device']['kind']}"
    )
    times = f"{result['wall_seconds']:.0f} s in all, {result['compile_seconds']:.0f} s of it compiling"
    return "\n".join([title, rows[0], "-" * max(map(len, rows)), *rows[1:], *_LEGEND, times])
