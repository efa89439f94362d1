"""One table of all scores on the Qwen models, to be sorted and filtered; a row has the command that measures it again.

The page has the rows as JSON, which `docs/_static/scores.js` shows: a row is a list in the order of `COLUMNS`.
"""

import json
import operator
import pathlib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import budget_of, choices_of
from experiments.cli import read_record
from experiments.evaluation import BASELINE, COUNTED, beside_reference, load
from experiments.evaluation.comparison import ACCOUNT
from experiments.evaluation.reachable import LEGEND, row_point, shares
from experiments.records import method_title, short_commit
from experiments.tasks import GROUPS

# "text" is the setting as a command takes it, and "again" the index of the command in "commands"; or null and a commit.
COLUMNS = (
    "method", "task", "tokens", "question", "model", "budget", "score", "of the oracle", "MB read", "of Full's", "MB held",
    "text", "again",
)  # fmt: skip
MEAN = "mean of tasks"
_FOLDERS = "qwen-*"
_PAGE = """# Every score

All scores on the Qwen models in one table ([records](index.md)): a row is a setting of a method on a task. A mean is over
the tasks on which Full has at least 60, without code, for settings that ran all of them. A click on a row shows the command
that measures it again. {legend}

```{{raw}} html
<link rel="stylesheet" href="../_static/scores.css">
<div id="scores"><noscript>This table needs JavaScript. The <a href="index.html">records</a> have the numbers.</noscript>
</div>
<script type="application/json" id="scores-data">{data}</script>
<script src="../_static/scores.js"></script>
```
"""


def page(docs: pathlib.Path) -> str:
    """Write the page; ``docs`` is the folder of the documentation, with the folder ``records`` in it."""
    text = json.dumps(data(sorted((docs / "records" / "results").glob(_FOLDERS))), separators=(",", ":"), ensure_ascii=False)
    return _PAGE.format(legend=LEGEND, data=text.replace("<", "\\u003c"))


def data(folders: Iterable[pathlib.Path]) -> dict[str, Any]:
    """Collect the rows of result folders: ``columns``, ``rows`` and the ``commands`` to which the rows refer."""
    found: list[dict[str, Any]] = []
    for folder in folders:
        more = {"folder": folder, "record": read_record(folder)}
        rows = [{**item.row, "comparable": item.comparable, **more} for item in beside_reference(load([folder]))]
        rows = [row for row in rows if row["unit"] == "percent" and row["length"]]
        found += [*rows, *_means(rows)]
    cell = operator.itemgetter("folder", "name", "length", "question")
    of_oracle = shares(found, cell, lambda row: row_point(row, "comparable"))
    commands: dict[str, int] = {}
    lines = [_line(row, share, commands) for row, share in zip(found, of_oracle, strict=True)]
    return {"columns": COLUMNS, "rows": lines, "commands": list(commands)}


def _means(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Average the rows of a folder over the tasks that count, for each setting that ran all of them at a length."""
    full_rows = [row for row in rows if row["method"] == BASELINE and row["name"] not in GROUPS["code"]]
    full = {(row["length"], row["name"]): row["value"] for row in full_rows}
    groups: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if full.get((row["length"], row["name"]), 0) >= COUNTED:
            groups.setdefault((row["method"], row["length"], row["question"]), {})[row["name"]] = row
    means = []
    for (_, length, _), cells in groups.items():
        tasks = sorted(name for (at, name), score in full.items() if at == length and score >= COUNTED)
        if len(tasks) < 2 or sorted(cells) != tasks:
            continue
        numbers = ("value", "comparable", *ACCOUNT)
        mean = {name: float(np.mean([row[name] for row in cells.values()])) for name in numbers}
        means.append({**next(iter(cells.values())), **mean, "name": MEAN, "task": ",".join(tasks)})
    return means


def _line(row: Mapping[str, Any], share: float | None, commands: dict[str, int]) -> list[Any]:
    text, settings = _text(row), row["record"]["settings"]
    again: int | str = short_commit(row["record"]["commit"])
    if text is not None:
        flags = {"--model": settings["model"], "--dtype": settings["dtype"], "--tasks": row["task"]}
        flags["--lengths"] = row["length"]
        flags |= {f"--{name}": row[name] for name in ("samples", "seed", "question")}
        command = " ".join(["kvjax eval", *(f"{flag} {shlex.quote(str(value))}" for flag, value in flags.items())])
        again = commands.setdefault(command, len(commands))
    return [
        method_title(row["method"]), row["name"], row["length"], row["question"], settings["model"], budget_of(row),
        round(row["value"], 1), None if share is None else round(share), round(row["bytes_read_per_step"] / 1e6, 1),
        round(100 * row["bytes_read_per_step"] / row["full_bytes_read_per_step"], 1),
        round(row["resident_bytes_per_row"] / 1e6, 1), text, again,
    ]  # fmt: skip


def _text(row: Mapping[str, Any]) -> str | None:
    """Write the setting as ``--methods`` takes it; None if today's methods have no such knob."""
    name, bracket, knobs = row["method"].partition("(")
    # Brackets of lists are those of tuples there.
    text = (row["knobs"] or {}).get("class", name) + (bracket + knobs).translate(str.maketrans("[]", "()"))
    try:
        (choice,) = choices_of(text)
    except ValueError:
        return None
    return text if choice else None
