"""Compare a record with another record of the same experiment, row by row, for example of two devices."""

from __future__ import annotations

import collections
import statistics
import types
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records.describe import IDENTITY, text_table
from experiments.records.library import LIBRARY_FIELD, library_text

_IDENTITY = (*IDENTITY, "haystack", "source", "seed")
_SAME_MODEL = ("model", "weights")  # rows of two models are not the same measurement


def beside(here: Mapping[str, Any], there: Mapping[str, Any], names: tuple[str, str] = ("here", "there")) -> str:
    """Show the rows that two records share, with both values and their ratio, as text.

    Records of different experiments, and rows whose value is no number, are refused by a ``ValueError``.
    """
    for name, record in zip(names, (here, there), strict=True):
        _check(record["metrics"], name)
    if here["experiment"] != there["experiment"]:
        raise ValueError(
            f"expected two records of one experiment, got {here['experiment']!r} in {names[0]} and "
            f"{there['experiment']!r} in {names[1]}"
        )
    lines = [f"{names[0]} (here, {_device(here)}) beside {names[1]} (there, {_device(there)})"]
    unlike = {
        name: (here["settings"][name], there["settings"][name])
        for name in here["settings"]
        if name in there["settings"] and name != "device" and here["settings"][name] != there["settings"][name]
    }
    differences = ", ".join(f"{name} {mine!r:.60} here and {theirs!r:.60} there" for name, (mine, theirs) in unlike.items())
    if any(name in unlike for name in _SAME_MODEL):
        return "\n".join([*lines, f"not compared, because they are of two models: {differences}"])
    lines += [f"settings that differ: {differences}"] * bool(differences)
    code = [_libraries(record["metrics"]) for record in (here, there)]
    if all(code) and len({*code[0], *code[1]}) > 1:
        lines.append(f"rows of code have other texts: of {', '.join(code[0])} here and {', '.join(code[1])} there")
    pairs = _pairs(here["metrics"], there["metrics"])
    if not pairs:
        return "\n".join([*lines, "no row is in both"])
    ratios = [mine["value"] / theirs["value"] for _, mine, theirs in pairs if theirs["value"]]
    fields = _telling([key for key, _, _ in pairs])
    table = [_line(key, fields, mine, theirs) for key, mine, theirs in pairs]
    columns = [name for name in table[0] if any(line[name] not in (None, "") for line in table)]
    lines += ["", *text_table(columns, table)]
    if ratios:
        spread = f"median {statistics.median(ratios):.3g}, from {min(ratios):.3g} to {max(ratios):.3g}"
        lines.append(f"ratio (here over there) of {len(ratios)} row{'s' * (len(ratios) > 1)}: {spread}")
    return "\n".join(lines)


def _libraries(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the standard libraries that rows of tasks of code were made from."""
    return list(dict.fromkeys(library_text(row[LIBRARY_FIELD]) for row in rows if LIBRARY_FIELD in row))


def _check(rows: Sequence[Mapping[str, Any]], name: str) -> None:
    for number, row in enumerate(rows, 1):
        if not isinstance(row.get("value"), (int, float, types.NoneType)):
            raise ValueError(f"{name}, row {number}: expected a number as value, got {row['value']!r:.60}")
        if not isinstance(row.get("knobs") or {}, dict):
            raise ValueError(f"{name}, row {number}: expected an object as knobs, got {row['knobs']!r:.60}")


def _device(record: Mapping[str, Any]) -> str:
    device = record.get("device") or "a device that is not recorded"
    if not isinstance(device, dict):
        return str(device)
    cores = f" of {device.get('cpu_cores')} cores" if device.get("platform") == "cpu" else ""
    count = device.get("count", 1)
    return f"{f'{count} x ' * (count != 1)}{device.get('kind')}{cores}"


_Key = dict[str, Any]


def _pairs(here: Sequence[Mapping], there: Sequence[Mapping]) -> list[tuple[_Key, Mapping, Mapping]]:
    """Pair the measured rows of both records, by the identity fields that both have; ambiguous rows are left out."""
    known = [{name for row in rows for name in row} for rows in (here, there)]
    names = [name for name in _IDENTITY if name in known[0] & known[1]]
    mine, theirs = ([row for row in rows if _measured(row)] for rows in (here, there))
    keys = [[tuple(str(row.get(name)) for name in names) for row in rows] for rows in (mine, theirs)]
    single = [{key for key, count in collections.Counter(each).items() if count == 1} for each in keys]
    others = dict(zip(keys[1], theirs, strict=True))
    shared = single[0] & single[1]
    return [
        ({name: row.get(name) for name in names}, row, others[key])
        for key, row in zip(keys[0], mine, strict=True)
        if key in shared
    ]


def _measured(row: Mapping[str, Any]) -> bool:
    return row.get("value") is not None and row.get("error") is None


def _telling(keys: Sequence[_Key]) -> list[str]:
    """Select the fields that tell rows apart; for a single row, its name, method and length."""
    varying = [name for name in keys[0] if len({str(key[name]) for key in keys}) > 1]
    return varying or [name for name in ("name", "method", "length") if name in keys[0]]


def _line(key: _Key, names: Sequence[str], mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Build a row of the table."""
    knobs, others = mine.get("knobs") or {}, theirs.get("knobs") or {}
    unlike = [f"{name}={knobs[name]}, there {others[name]}" for name in knobs if knobs[name] != others.get(name, knobs[name])]
    if mine.get("samples") != theirs.get("samples"):
        unlike.append(f"samples {mine.get('samples')}, there {theirs.get('samples')}")
    return {
        **{name: key[name] for name in names},
        "unit": mine.get("unit"),
        "here": float(mine["value"]),
        "there": float(theirs["value"]),
        "ratio": mine["value"] / theirs["value"] if theirs["value"] else None,
        "not the same": "; ".join(unlike),
    }
