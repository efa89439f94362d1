"""The parts of pages about the untouched model: the cells that it solves, and whether the tuned model ranks methods alike."""

from __future__ import annotations

import functools
import math
import pathlib
from collections.abc import Callable

from experiments.evaluation import (
    SOLVED,
    Change,
    Difference,
    beside_full,
    changes,
    kendall_tau,
    mean_scores,
    solved,
)
from experiments.lab.site.marks import missing
from experiments.lab.site.quality import short
from experiments.lab.site.runs import Runs, share
from experiments.records import markdown_rows, method_title, token_label

BASE, TUNED = "base", "base-tuned"


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """List the functions that make the parts, by name; see `experiments.lab.site.marks`."""
    base, tuned = Runs(docs, (BASE,)), Runs(docs, (TUNED,))
    alone = functools.partial(missing, docs, (BASE,))
    both = functools.partial(missing, docs, (BASE, TUNED))
    return {
        "base-cells": functools.partial(cells, base) if base else alone,
        "base-means": functools.partial(means, base) if base else alone,
        "order": functools.partial(order, base, tuned) if base and tuned else both,
    }


def cells(runs: Runs) -> str:
    """Show Full's score in every cell; the cells that count are bold."""
    full = {
        (entry.row["name"], entry.row["length"]): entry.row["value"]
        for entry in runs.own
        if entry.row["method"] == "full"
    }
    lengths = sorted({length for _, length in full})
    body = []
    for name in dict.fromkeys(name for name, _ in full):
        scores = [full.get((name, length)) for length in lengths]
        shown = ["" if score is None else f"**{score:.1f}**" if score >= SOLVED else f"{score:.1f}" for score in scores]
        body.append((f"`{name}`", *shown))
    head = ("Full's score", *(f"{length:,} tokens" for length in lengths))
    return f"{runs.about}.\n\n" + "\n".join(markdown_rows([head, *body]))


def means(runs: Runs) -> str:
    """Show every method on the cells that count."""
    counted = solved(runs.own)
    if not counted:
        return f"Full scores below {SOLVED:.0f} in every cell, so none counts."
    mine = [entry for entry in runs.own if entry.cell in counted]
    values = {(entry.row["method"], entry.cell): entry.row["value"] for entry in mine}
    compared = beside_full(mine)
    scores = mean_scores(mine, counted)
    body = []
    for method in sorted(scores, key=lambda method: (method != "full", -scores[method])):
        items = [item for item in compared if item.row["method"] == method]
        widths = [(item.interval_95[1] - item.interval_95[0]) / 2 for item in items]
        gap = sum(item.difference for item in items) / len(items)
        noise = math.sqrt(sum(width**2 for width in widths)) / len(items)
        bytes_read = {
            name: sum(item.row[name] for item in items) for name in ("bytes_read_per_step", "full_bytes_read_per_step")
        }
        lost = "" if method == "full" else f"{gap:+.1f} ± {noise:.1f}"
        each = (f"{values[method, cell]:.1f}" for cell in counted)
        body.append((method_title(method), f"{scores[method]:.1f}", lost, *each, share(bytes_read)))
    head = ("method", "mean", "against Full", *(_cell_title(cell) for cell in counted), "read")
    return "\n".join(markdown_rows([head, *body]))


def order(base: Runs, tuned: Runs) -> str:
    """Tell Kendall's tau of the methods' mean scores on both models, and the pairs of methods that change places."""
    have = {entry.cell for entry in tuned.own}
    shared = [cell for cell in solved(base.own) if cell in have]
    if not shared:
        return f"The base's Full scores below {SOLVED:.0f} in every cell that both were asked, so nothing can be said."
    first, second = (
        mean_scores([entry for entry in runs.own if entry.row["method"] != "full"], shared) for runs in (base, tuned)
    )
    methods = sorted((method for method in first if method in second), key=lambda method: -first[method])
    ranks = [_ranks({method: scores[method] for method in methods}) for scores in (first, second)]
    body = [(method_title(x), f"{first[x]:.1f}", f"{second[x]:.1f}", f"{ranks[0][x]:g}", f"{ranks[1][x]:g}") for x in methods]
    table = "\n".join(markdown_rows([("method", "base", "tuned", "rank on the base", "rank on the tuned"), *body]))
    tau = kendall_tau([first[x] for x in methods], [second[x] for x in methods])
    every = [c for c in changes(base.own, tuned.own, shared) if "full" not in (c.better, c.worse)]
    beyond = [change for change in every if change.beyond_noise]
    count = len(methods) * (len(methods) - 1) // 2
    told = (
        f"Kendall's tau of the two orders is {tau:.2f} ({len(methods)} methods, mean of the {len(shared)} cells that the "
        f"base solves: {', '.join(_cell_title(cell) for cell in shared)})."
    )
    changed = f"None of the {count} pairs of methods changes places."
    if every:
        changed = (
            f"Of the {count} pairs of methods, {len(every)} change places, none of them beyond the paired 95 % intervals on "
            "both models."
        )
    if beyond:
        changed = (
            f"Of the {count} pairs of methods, {len(every)} change places, {len(beyond)} of them beyond the paired 95 % "
            "intervals on both models:"
        )
    return "\n\n".join([f"{told} {changed}", *(["\n".join(map(_told, beyond))] if beyond else []), table])


def _ranks(scores: dict[str, float]) -> dict[str, float]:
    """Rank the methods from 1, the best; methods that tie share the mean of their ranks."""
    values = list(scores.values())
    return {
        name: 1 + sum(other > mine for other in values) + (values.count(mine) - 1) / 2 for name, mine in scores.items()
    }


def _told(change: Change) -> str:
    def points(gap: Difference) -> str:
        return f"{gap.mean:+.1f} ± {gap.plus_minus:.1f}"

    return (
        f"* {method_title(change.better)} less {method_title(change.worse)}: {points(change.first)} on the base, "
        f"{points(change.second)} on the tuned model."
    )


def _cell_title(cell: tuple) -> str:
    task, length = cell[:2]
    return f"{short(task)} at {token_label(length)}"
