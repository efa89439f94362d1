"""Records in small files: what rows of one setting or of one cell have in common stands once, in ``shared``."""

import json
from typing import Any

_ALIKE = ("method", "knobs"), ("name", "source", "length", "question", "seed", "samples")


def fold(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose rows name, as ``like``, the entries of ``shared`` with their other fields."""
    shared: list[dict[str, Any]] = []
    whole = unfold(record)["metrics"]
    rows = [{"like": [], **row} for row in whole]
    for names in _ALIKE:
        groups: dict[str, list[dict[str, Any]]] = {}
        for row, full in zip(rows, whole, strict=True):
            groups.setdefault(json.dumps([full.get(name) for name in names]), []).append(row)
        for first, *others in groups.values():
            same = [x for x in first if x != "like" and all(x in row and row[x] == first[x] for row in others)]
            shared.append({name: first[name] for name in same})
            for row in (first, *others):
                row["like"].append(len(shared) - 1)
                for name in same:
                    del row[name]
    return {**record, "metrics": rows, "shared": shared}


def unfold(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose rows have all their fields."""
    shared = record.get("shared", [])
    parts = ([*(shared[at] for at in row.get("like", ())), row] for row in record["metrics"])
    rows = [{name: value for part in some for name, value in part.items() if name != "like"} for some in parts]
    return {name: value for name, value in record.items() if name != "shared"} | {"metrics": rows}
