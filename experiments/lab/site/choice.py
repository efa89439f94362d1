"""The figures on the page about the choice of a method: points lost on the real model, bytes read, bytes held, and time."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

from experiments.answering import PAPERS
from experiments.lab.site import untouched
from experiments.lab.site.marks import missing
from experiments.lab.site.method_costs import load
from experiments.lab.site.quality import MAIN
from experiments.lab.site.runs import Runs, against, share
from experiments.records import markdown_rows, method_title, token_label

_SPEED_LENGTH = 131_072  # tokens of the decode steps whose times are shown


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """List the functions that make the parts, by name; see `experiments.lab.site.marks`."""
    runs = untouched.runs_of(docs) if untouched.measured(docs) else Runs(docs, MAIN)
    there = bool(runs)
    return {
        "choosing": functools.partial(numbers, runs, docs) if there else functools.partial(missing, docs, ("main",)),
        "papers": functools.partial(losses, runs) if there else functools.partial(missing, docs, ("main",)),
    }


def numbers(runs: Runs, docs: pathlib.Path) -> str:
    """Show the points that a method loses, the bytes that it reads and holds, and a step's time; the best score first."""
    lengths, after = runs.shown("prefill"), runs.lengths("extend")
    first = lengths[0]  # where every method was asked
    times = step_times(docs)
    head = ["method", *(f"against Full at {token_label(length)}" for length in lengths)]
    head += [f"question after, {token_label(length)}" for length in after]
    head += [
        f"reads at {token_label(first)}",
        f"holds at {token_label(first)}",
        f"ms per token at {token_label(_SPEED_LENGTH)}",
    ]
    full = runs.mean("full", "prefill", first)
    body = []
    for method in runs.ranked("prefill", first):
        mean = runs.mean(method, "prefill", first)
        costs = ("", "")
        if mean is not None and full is not None:
            held = 100 * mean["resident_bytes_per_row"] / full["resident_bytes_per_row"]
            costs = (share(mean), f"{held:.1f} %")
        lost = [against(runs.mean(method, "prefill", length)) for length in lengths]
        lost += [against(runs.mean(method, "extend", length)) for length in after]
        time = f"{1e3 * times[method]:.2f}" if method in times else ""
        body.append((method_title(method), *lost, *costs, time))
    told = (
        f"{runs.about}. Points of the score with 95 % intervals; reads and holds: share of what Full reads per step and "
        "holds. The times are of a Llama-3.1-8B shape ([speed](tables/speed.md))."
    )
    return f"{told}\n\n" + "\n".join(markdown_rows([head, *body]))


def losses(runs: Runs) -> str:
    """Show the points of the five papers' methods against Full; the method that loses least is first."""
    lengths = runs.shown("prefill")
    lost = {x: [against(runs.mean(x, "prefill", length)) for length in lengths] for x in PAPERS}
    shown = [x for x in runs.ranked("prefill", lengths[0]) if x in lost]
    head = ("method", *map(token_label, lengths))
    return "\n".join(markdown_rows([head, *((f"[{method_title(x)}](methods/{x}.md)", *lost[x]) for x in shown)]))


def step_times(docs: pathlib.Path) -> dict[str, float]:
    """Return seconds per token of one row after 131,072 tokens, by method.

    A method with several settings is represented by the setting that has no note, or else by the first.
    """
    made: dict[str, float] = {}
    rows = load(docs / "records" / "speed.json").get("metrics", ())
    for row in sorted(rows, key=lambda row: bool(row.get("note"))):
        if (row["name"], row["length"], row["batch"]) == ("decode", _SPEED_LENGTH, 1) and row["error"] is None:
            made.setdefault(row["method"], row["value"])
    return made
