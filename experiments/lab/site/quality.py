"""The tables of scores in the README and on the pages about quality, from the result folders in ``docs``."""

from __future__ import annotations

import functools
import math
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.answering import PAPERS, without_effect
from experiments.lab.site import method_pages
from experiments.lab.site.marks import missing
from experiments.lab.site.runs import Row, Runs, against, megabytes, read, share, wrapped
from experiments.records import markdown_rows, method_title, token_label
from experiments.tasks import expand

MAIN = ("main", "main-16k", "main-extend")
BEST = 6  # baselines in the README's table
SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the length: the budgets of docs/settings/main.yaml
_ABOUT = """\
`python -m kvjax eval --config docs/settings/main.yaml --out runs/main` makes the columns of 8K, `main-16k.yaml` and
`main-extend.yaml` the other columns. UUIDs decide the ranking: methods that score blocks, sentences or pages miss them."""
_NEAR = 0.05  # CHESS' ratios only come near a share
_OF_BUDGET = ({"budget"}, {"ratios"}, {"channels", "fraction"})  # knobs that give a budget and nothing else
_SHORT = {
    "niah_": "",
    "number_string": "numbers",
    "kv_retrieval": "key-value",
}  # names of tasks in the heads of columns


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """List the functions that make the parts about the main runs and the toy, by name; see `experiments.lab.site.marks`."""
    main, toy = Runs(docs, MAIN), Runs(docs, ("toy",))

    def unless_missing(make: Callable[[Runs], str], settings: tuple[str, ...]) -> Callable[[], str]:
        there = all((docs / "records" / "results" / name).is_dir() for name in settings)
        return functools.partial(make, main) if there else functools.partial(missing, docs, settings)

    shown = main if (docs / "records" / "results" / "main").is_dir() else toy
    return {
        "methods": method_pages.front,  # the README has one page; methods/index.md lists all
        "quality": functools.partial(front, shown),
        "main-means": unless_missing(means, ("main",)),
        "main-tasks": unless_missing(tasks, ("main",)),
        "main-questions": unless_missing(questions, ("main", "main-extend")),
        "main-budgets": unless_missing(budgets, ("main",)),
        "toy-means": functools.partial(means, toy),
    }


def front(runs: Runs) -> str:
    """Write the README's table, the best first: Full, the five papers' methods, and the best baselines."""
    lengths, after = runs.shown("prefill"), runs.lengths("extend")
    first = lengths[0]  # where every method was asked
    ranked = runs.ranked("prefill", first)
    own = {"full", *PAPERS}
    head = ["method", *(f"score at {token_label(length)}" for length in lengths)]
    head += [f"question after, {token_label(length)}" for length in after]
    head += [f"read per step at {token_label(first)}", f"resident at {token_label(first)}"]
    body = []
    best = {*own, *[method for method in ranked if method not in own][:BEST]}
    for method in (method for method in ranked if method in best):
        asked = [("prefill", length) for length in lengths] + [("extend", length) for length in after]
        mean = runs.mean(method, "prefill", first)
        cost = () if mean is None else (read(mean), megabytes(mean["resident_bytes_per_row"]))
        body.append((method_title(method), *(mean_score(runs.mean(method, *at)) for at in asked), *cost))
    full = runs.means[0]
    told = (
        f"{runs.subject}: scores from 0 to 100, means of {full['tasks']} tasks with {full['samples']} samples of each, the "
        f"question in the prompt{' or after it (the context is compressed without it)' if after else ''}. Shares are of what "
        "a decode step reads under Full."
    )
    if len(best) < len(ranked):
        told += f" Of {len(ranked) - len(own)} baselines the best {BEST}; [all](docs/quality-twin.md)."
    about = f"\n\n{_ABOUT}" if runs.folders[0].name == MAIN[0] else ""
    return f"{wrapped(told)}\n\n{table(head, body)}{about}"


def means(runs: Runs) -> str:
    """Show every method at its own setting: means over tasks, beside Full, with costs."""
    asked = [("prefill", length) for length in runs.lengths("prefill")]
    body = []
    for method in runs.ranked(*asked[0]):
        for at in asked:
            if (mean := runs.mean(method, *at)) is not None:
                body.append(
                    (
                        method_title(method) + (" (no effect)" if without_effect(mean) else ""),
                        f"{at[1]:,}",
                        mean_score(mean),
                        against(mean),
                        f"{mean['same']:.0f} %",
                        f"{mean['attended_tokens']:,} of {mean['length_tokens']:,}",
                        read(mean),
                        megabytes(mean["resident_bytes_per_row"]),
                    )
                )
    head = ("method", "length", "score", "against Full", "same answer", "tokens attended", "read per step", "resident")
    full = runs.means[0]
    told = f"{runs.about}. Means of {full['tasks']} tasks with {full['samples']} samples of each."
    links = ", ".join(f"[{x.name}](records/results/{x.name}/table.md)" for x in runs.folders)
    return f"{wrapped(told)}\n\n{table(head, body)}\n\nEvery cell: {links}."


def tasks(runs: Runs) -> str:
    """Show the score of every method in every task at the shortest length, with the question in the prompt."""
    length = runs.lengths("prefill")[0]
    rows = [x.row for x in runs.compared if (x.row["question"], x.row["length"]) == ("prefill", length)]
    names = sorted(dict.fromkeys(row["name"] for row in rows), key=expand(("trained",)).index)
    at = {(row["method"], row["name"]): row["value"] for row in rows}
    body = []
    for method in runs.ranked("prefill", length):
        body.append((method_title(method), *(f"{at[method, name]:.0f}" if (method, name) in at else "" for name in names)))
    return table(("method", *(short(name) for name in names)), body)


def questions(runs: Runs) -> str:
    """Show scores with the question in the prompt that is compressed, and with the question after it."""
    (length,) = runs.lengths("extend")
    both = {x: tuple(runs.mean(x, asked, length) for asked in ("prefill", "extend")) for x in runs.ranked("prefill", length)}
    return question_table(both)


def question_table(means: Mapping[str, tuple[Row | None, Row | None]]) -> str:
    """Format the means of each method with the question in the prompt, and with the question after it."""
    scored = {method: [cell for mean in both for cell in (mean_score(mean), against(mean))] for method, both in means.items()}
    head = ("method", "question in the prompt", "against Full", "question after", "against Full")
    return table(head, [(method_title(method), *cells) for method, cells in scored.items()])


def budgets(runs: Runs) -> str:
    """Score, and share of the bytes read, of the methods that were run at several budgets; with the first folder's figure."""
    length = runs.lengths("prefill")[0]
    cells: dict[tuple[str, str], list[Row]] = {}
    for entry in runs.entries:
        row = entry.row
        if (row["question"], row["length"]) == ("prefill", length) and (column := _column(row)):
            cells.setdefault((row["method"].partition("(")[0], column), []).append(row)
    whole = max(map(len, cells.values()))  # of a setting that was not run on all tasks no mean is shown
    cells = {at: rows for at, rows in cells.items() if len(rows) == whole}
    several = [x for x in dict.fromkeys(name for name, _ in cells) if any((x, str(s)) in cells for s in SHARES)]
    body = []
    for name in several:
        line = {column: rows for (method, column), rows in cells.items() if method == name}
        line.setdefault(str(nominal(line["own"][0])), line["own"])  # its own budget may be one of these
        body.append((method_title(name), *(_scored(line.get(column)) for column in ("own", *map(str, SHARES)))))
    head = ("method", "own budget", *(f"1/{round(1 / s)}" for s in SHARES))
    picture = f"![score against bytes read per step](records/results/{runs.folders[0].name}/pareto.png)"
    return f"{table(head, body)}\n\n{picture}"


def _column(row: Row) -> str:
    """Find the column of `budgets` that a row belongs to: "own", a share of `SHARES`, or "" for another setting."""
    _, bracket, knobs = row["method"].partition("(")
    if not bracket:
        return "own"
    if set(re.findall(r"(\w+)=", knobs)) not in _OF_BUDGET:
        return ""
    return next((str(share) for share in SHARES if math.isclose(nominal(row), share, rel_tol=_NEAR)), "")


def nominal(row: Row) -> float:
    """Compute the share of the context that a row's setting reads, from its knobs."""
    knobs = row["knobs"]
    if "ratios" in knobs:
        return math.prod(knobs["ratios"])
    if "fraction" in knobs:
        return knobs["channels"] * knobs["fraction"]
    return knobs["budget"] / row["length"]


def short(name: str) -> str:
    """Shorten a task's name for the head of a column."""
    for long, brief in _SHORT.items():
        name = name.replace(long, brief)
    return name


def _scored(rows: list[Row] | None) -> str:
    if not rows:
        return ""
    total = {name: sum(row[name] for row in rows) for name in ("bytes_read_per_step", "full_bytes_read_per_step")}
    return f"{np.mean([row['value'] for row in rows]):.1f} ({share(total)})"


def mean_score(mean: Row | None) -> str:
    """Format the score of a mean; nothing if there is none."""
    return "" if mean is None else f"{mean['score']:.1f}"


def table(head: Any, body: Any) -> str:
    """Format a Markdown table."""
    return "\n".join(markdown_rows([head, *body]))
