"""The scores on a method's page, with intervals, from the records in ``docs``."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.site.method_costs import load
from experiments.records import markdown_rows

Row = Mapping[str, Any]

_SETTING = ("label", "question", "questions", "budget", "haystack", "source", "seed", "note")  # a table for each of them
_QUESTIONS = {"prefill": "in the prompt", "extend": "after compression", "turns": "one after the other in one cache"}
_COSTS = (
    ("tokens attended", "attended_tokens", ",.0f", 1.0),
    ("read per step, MB", "bytes_read_per_step", ",.1f", 1e-6),
    ("Full would read, MB", "full_bytes_read_per_step", ",.1f", 1e-6),
    ("resident per row, MB", "resident_bytes_per_row", ",.1f", 1e-6),
)


def scores(name: str, docs: pathlib.Path) -> str:
    """Show the scores of a method from the records of the demo and of all result folders; "" if there are none.

    Args:
        name: lower-case name of the method.
        docs: folder of the documentation, with the folder ``records`` in it.
    """
    parts = [_demo(name, docs)]
    for path in sorted(docs.glob("records/results/*/metrics.json")):
        link = f"[record](../{path.relative_to(docs).as_posix()})"
        parts.append(_section(path.parent.name, path, name, link))
    return "\n\n".join(part for part in parts if part)


def score_tables(cells: Sequence[Row]) -> str:
    """Show scores with intervals for each setting: a line for each task, a column for each length, means and costs.

    Args:
        cells: cells with "task" (or "name"), "score" (or "value") and "length", which is None for examples of a file. The
            fields "interval_95", "samples", "depth" and costs are shown if a cell has them. Other fields tell settings apart.

    Raises:
        ValueError: two cells have the same setting, task and length.
    """
    groups: dict[tuple, list[Row]] = {}
    for row in cells:
        told = {field: row[field] for field in _SETTING if row.get(field) not in (None, "", 0)}
        told["question"] = _QUESTIONS.get(told.get("question", ""), told.get("question", ""))
        if told.get("questions") == 1:
            del told["questions"]
        unit = row.get("unit", "percent")
        groups.setdefault((("unit", unit), *told.items()), []).append(row)
    return "\n\n".join(_table(dict(told), group) for told, group in groups.items())


def _table(told: dict[str, Any], cells: Sequence[Row]) -> str:
    at = {(_task(row), row["length"]): row for row in cells}
    if len(at) < len(cells):
        raise ValueError(f"expected one cell per task and length under {told}, got {len(cells)} for {len(at)} of them")
    lengths = sorted({row["length"] for row in cells}, key=lambda length: length or 0)
    tasks = list(dict.fromkeys(_task(row) for row in cells))
    body = [(task, *(_score(at.get((task, length))) for length in lengths)) for task in tasks]
    if len(tasks) > 1:
        body.append(("**mean**", *(_mean(cells, length, "score", ".1f", 1.0) for length in lengths)))
    for label, field, style, scale in _COSTS:
        line = [_mean(cells, length, field, style, scale) for length in lengths]
        body += [(label, *line)] if any(line) else []
    samples = sorted({row["samples"] for row in cells if row.get("samples")})
    counted = f"{'-'.join(str(n) for n in dict.fromkeys((samples[0], samples[-1])))} samples a cell" if samples else ""
    unit = told.pop("unit")
    shown = [f"{name} {value}" for name, value in told.items() if value and name != "label"]
    caption = [f"`{told['label']}`" if told.get("label") else "", "" if unit == "percent" else unit, *shown, counted]
    if any(row.get("interval_95") for row in cells):
        caption.append("95 % intervals in brackets")
    head = ("task", *("as given" if length is None else f"{length:,} tokens" for length in lengths))
    return "\n".join([*markdown_rows([head, *body]), "", f"{'; '.join(text for text in caption if text)}."])


def _task(row: Row) -> str:
    depth = row.get("depth")
    return f"`{row.get('task', row.get('name'))}`" + ("" if depth is None else f", depth {depth:.0%}")


def _value(row: Row, field: str) -> float | None:
    return row.get("score", row.get("value")) if field == "score" else row.get(field)


def _score(row: Row | None) -> str:
    if row is None:
        return ""
    interval = row.get("interval_95")
    return f"{_value(row, 'score'):.1f}" + (f" ({interval[0]:.0f} - {interval[1]:.0f})" if interval else "")


def _mean(cells: Sequence[Row], length: int | None, field: str, style: str, scale: float) -> str:
    """Format the mean of a field over the cells of a length, or "" if a cell lacks the field."""
    values = [_value(row, field) for row in cells if row["length"] == length]
    known = [value for value in values if value is not None]
    return format(scale * sum(known) / len(known), style) if len(known) == len(values) else ""


def _section(title: str, path: pathlib.Path, name: str, link: str) -> str:
    """Write the tables of a record, with their origin."""
    record = load(path)
    settings = record.get("settings") or {}
    mine = []
    for row in record.get("metrics") or record.get("rows") or ():
        method, bracket, _ = str(row.get("method", "")).partition("(")
        if method.strip().lower() == name:
            label = row["method"] if bracket else ""
            mine.append({"question": settings.get("question"), **row, "label": label})
    if not mine:
        return ""
    told = [f"{field} {settings[field]}" for field in ("model", "dtype", "decoding") if settings.get(field)]
    return f"### {title}\n\n{score_tables(mine)}\n\n{'; '.join([*told, *_origin(record), link])}."


def _demo(name: str, docs: pathlib.Path) -> str:
    """Show the rows of the demo at 16K tokens, which has rows of every baseline."""
    record = load(docs / "records" / "demo-16k.json")
    mine = [row for row in record.get("metrics", ()) if row["method"] == name]
    if not mine:
        return ""
    head = ("budget", "accuracy", "same answer as Full", "tokens attended", "question")
    body = [
        (
            row["budget"] or "everything",
            f"{row['value']:.0f} %",
            f"{row['agreement_percent']:.0f} %",
            f"{row['attended_tokens']:,.0f}",
            _QUESTIONS[row["question"]],
        )
        for row in mine
    ]
    settings = record["settings"]
    told = [f"model {settings['model']}", settings["dtype"], f"{mine[0]['samples']} answers", *_origin(record)]
    table = "\n".join(markdown_rows([head, *body]))
    title = f"Needles in prose at {settings['length']:,} tokens"
    return f"### {title}\n\n{table}\n\n{'; '.join(told)}; [record](../records/demo-16k.json)."


def _origin(record: Row) -> list[str]:
    """List the device, date and commit of a record, if it has them."""
    device, commit = record.get("device") or {}, record.get("commit")
    told = [device.get("kind"), (record.get("date") or "")[:10], f"commit {commit[:10]}" if commit else None]
    return [text for text in told if text]
