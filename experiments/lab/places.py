"""Scores by place in the answer: `python -m experiments.lab.places runs/long-answers`.

A method that loses quality while it generates has fewer right steps in later quarters of its answers. Full's own share may
fall too, because later steps are harder. So the measure of drift is the difference to Full in the last quarter less the
difference to Full in the first, on the same examples.

The predictions that a folder keeps are enough: nothing is generated again. A folder that lacks them has a digest of each
answer; ``--predictions`` then names folders that have the answers, which must have these digests. The table and its JSON
record, places.md and places.json, go beside the folder's own table.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli import Job, option, read_record
from experiments.evaluation import examples
from experiments.evaluation.comparison import BASELINE
from experiments.evaluation.folder import read_predictions
from experiments.records import bootstrap_interval, commit, method_title, write_bytes
from experiments.records.report import Column, row_table
from experiments.tasks import TASKS, get_task, quarter_shares

_ABOUT = (
    "The share of right steps in each quarter of the right answer, in percent. Drift: the difference to Full in the last "
    "quarter less the difference to Full in the first, in points, with a 95 % paired bootstrap interval; bold: beyond noise."
)


@dataclasses.dataclass(frozen=True)
class PlacesCommand:
    """Which answers to look at.

    Attributes:
        folder: a result folder of eval
        predictions: comma-separated, other folders that have the folder's predictions (default: the folder)
    """

    folder: pathlib.Path = option(positional=True)
    predictions: tuple[pathlib.Path, ...] = ()


def _places(command: PlacesCommand) -> None:
    record = read_record(command.folder)
    rows = places(command.folder, command.predictions)
    about = {"experiment": "places", "commit": commit(), "of": {name: record[name] for name in ("date", "commit", "device")}}
    text = json.dumps({**about, "settings": record["settings"], "metrics": rows}) + "\n"
    for name, data in (("places.json", text), ("places.md", report(command.folder.resolve().name, rows))):
        write_bytes(command.folder / name, data.encode())
        print(f"written: {command.folder / name}", file=sys.stderr)


def places(folder: pathlib.Path, elsewhere: Sequence[pathlib.Path] = ()) -> list[dict[str, Any]]:
    """Compute the quarters of each row of a folder whose task has steps.

    Args:
        folder: a result folder.
        elsewhere: folders to look for predictions that it lacks.

    Returns:
        For each row: the method, the task as "name", its length, "value" and "quarters", 0 to 100, and, beside a row of Full
        with the same examples, "drift" in points and "drift_95"; by task and length, best score first.

    Raises:
        ValueError: no row has a task of steps, or a row's predictions are missing or are other answers than the folder's.
    """
    kept = examples.unpacked(folder / examples.FILE)
    cells: dict[tuple[str, int, str], list[tuple[Mapping[str, Any], list[dict[str, Any]], np.ndarray]]] = {}
    for row in read_record(folder)["metrics"]:
        right = get_task(row["name"]).right_steps if row["name"] in TASKS else None
        if right is None:
            continue
        lines = _predictions(folder, elsewhere, row, kept)
        shares = np.asarray([quarter_shares(right(line["prediction"], line["answers"])) for line in lines])
        cells.setdefault((row["name"], row["length"], row["question"]), []).append((row, lines, shares))
    if not cells:
        raise ValueError(f"{folder} has no task of steps, such as table_1: its answers have no places")
    rows = []
    for cell in cells.values():
        full = next(((lines, shares) for row, lines, shares in cell if row["method"] == BASELINE), None)
        for row, lines, shares in sorted(cell, key=lambda one: -one[2].mean()):
            about = {name: row[name] for name in ("name", "length", "question", "method")}
            about |= {"value": _percent(shares.mean()), "unit": "percent", "examples": len(lines)}
            about["quarters"] = [_percent(share) for share in shares.mean(axis=0)]
            if full is not None and [line["key"] for line in lines] == [line["key"] for line in full[0]]:
                beside = shares - full[1]
                drift = beside[:, -1] - beside[:, 0]
                about |= {"drift": _percent(drift.mean()), "drift_95": [*map(_percent, bootstrap_interval(drift.tolist()))]}
            rows.append(about)
    return rows


def _percent(share: float) -> float:
    return round(100 * float(share), 2)


def _predictions(
    folder: pathlib.Path, elsewhere: Sequence[pathlib.Path], row: Mapping[str, Any], kept: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Read the predictions of a row where they are, and refuse other answers than the folder's."""
    name = row["predictions"]
    places = [place for place in (folder, *elsewhere) if (place / name).is_file()]
    candidates = [read_predictions(place, row) for place in places or [folder]]
    for lines in candidates:
        if name not in kept or [examples.brief(line) for line in lines] == kept[name]:
            return lines
    raise ValueError(f"{places[-1] / name} holds other answers than {folder} has in {examples.FILE}")


_COLUMNS: dict[str, Column] = {
    "method": lambda row: method_title(row["method"]),
    "score": ("value", 1, ".1f"),
    **{name: lambda row, at=at: f"{row['quarters'][at]:.1f}" for at, name in enumerate(("1st quarter", "2nd", "3rd", "4th"))},
    "drift [95 %]": lambda row: _drift(row),
}


def report(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the rows of `places` as a page: a table for each task and length."""
    parts = [f"# By place in the answer: {title}", _ABOUT]
    for name, length, question in dict.fromkeys((row["name"], row["length"], row["question"]) for row in rows):
        mine = [row for row in rows if (row["name"], row["length"], row["question"]) == (name, length, question)]
        asked = "" if question == "prefill" else f", question {question}"
        parts += [f"## {name}, {length:,} tokens{asked}", "\n".join(row_table(mine, _COLUMNS))]
    return "\n\n".join(parts) + "\n"


def _drift(row: Mapping[str, Any]) -> str:
    """Format a row's drift; "" for Full and for a row without Full beside it."""
    if row["method"] == BASELINE or "drift" not in row:
        return ""
    low, high = row["drift_95"]
    text = f"{row['drift']:+.1f} [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


main = Job(_places, PlacesCommand)


if __name__ == "__main__":
    sys.exit(main())
