"""Compare a record with another record of the same experiment, row by row, for example of two devices."""

import collections
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records.describe import IDENTITY, text_table
from experiments.records.library import LIBRARY_FIELD

_IDENTITY = (*IDENTITY, "haystack", "source", "seed", LIBRARY_FIELD)
_SAME_MODEL = ("model", "weights")  # rows of two models are not the same measurement
_Row = Mapping[str, Any]


def beside(here: Mapping[str, Any], there: Mapping[str, Any], names: tuple[str, str] = ("here", "there")) -> str:
    """Show the rows that two records share, with both values and their ratio, as text, and whether their intervals overlap.

    Rows that differ in the seed alone are shared: two seeds of a measurement should agree.
    Records of different experiments are refused by a ``ValueError``; rows whose values are no numbers by a ``TypeError``.
    """
    if here["experiment"] != there["experiment"]:
        raise ValueError(
            f"expected two records of one experiment, got {here['experiment']!r} in {names[0]} and "
            f"{there['experiment']!r} in {names[1]}"
        )
    lines = [f"{names[0]} (here, {_device(here)}) beside {names[1]} (there, {_device(there)})"]
    mine, theirs = here["settings"], there["settings"]
    unlike = [name for name in mine if name in theirs and name != "device" and mine[name] != theirs[name]]
    differences = ", ".join(f"{name} {mine[name]!r:.60} here and {theirs[name]!r:.60} there" for name in unlike)
    if any(name in unlike for name in _SAME_MODEL):
        return "\n".join([*lines, f"not compared, because they are of two models: {differences}"])
    lines += [f"settings that differ: {differences}"] * bool(differences)
    fields, pairs = _pairs(here["metrics"], there["metrics"], {"seed"} & set(unlike))
    if not pairs:
        return "\n".join([*lines, "no row is in both"])
    telling = [name for name in fields if len({str(row.get(name)) for row, _ in pairs}) > 1]
    table = [_line(telling or ["name", "method", "length"], *pair) for pair in pairs]
    columns = [name for name in table[0] if any(line[name] not in (None, "") for line in table)]
    lines += ["", *text_table(columns, table)]
    if ratios := [line["ratio"] for line in table if line["ratio"] is not None]:
        spread = f"median {statistics.median(ratios):.3g}, from {min(ratios):.3g} to {max(ratios):.3g}"
        lines.append(f"ratio (here over there) of {len(ratios)} row{'s' * (len(ratios) > 1)}: {spread}")
    if apart := [found for pair in pairs if (found := _apart(*pair)) is not None]:
        lines.append(f"95 % intervals overlap in {apart.count(False)} of {len(apart)} row{'s' * (len(apart) > 1)}")
    return "\n".join(lines)


def _device(record: Mapping[str, Any]) -> str:
    device = record.get("device") or {"kind": "a device that is not recorded"}
    cores = f" of {device.get('cpu_cores')} cores" if device.get("platform") == "cpu" else ""
    count = device.get("count", 1)
    return f"{f'{count} x ' * (count != 1)}{device.get('kind')}{cores}"


def _pairs(here: Sequence[_Row], there: Sequence[_Row], but: set[str]) -> tuple[list[str], list[tuple[_Row, _Row]]]:
    """Pair the measured rows of both records by the identity fields that both have, without ``but``; not ambiguous ones."""
    known = [{name for row in rows for name in row} for rows in (here, there)]
    names = [name for name in _IDENTITY if name in (known[0] & known[1]) - but]
    keyed = []
    for rows in (here, there):
        measured = [row for row in rows if row.get("value") is not None and row.get("error") is None]
        keys = [tuple(str(row.get(name)) for name in names) for row in measured]
        count = collections.Counter(keys)
        keyed.append({key: row for key, row in zip(keys, measured, strict=True) if count[key] == 1})
    return names, [(row, keyed[1][key]) for key, row in keyed[0].items() if key in keyed[1]]


def _apart(*pair: _Row) -> bool | None:
    """Tell whether two scores' 95 % intervals lie apart, those without a width by the rule of three; None if one has none."""
    if not all(row.get("interval_95") and row.get("examples") for row in pair):
        return None
    reach = [300 / row["examples"] * (row["interval_95"][0] == row["interval_95"][1]) for row in pair]
    (low, high), (least, most) = (row["interval_95"] for row in pair)
    return low - reach[0] > most + reach[1] or least - reach[1] > high + reach[0]


def _line(names: Sequence[str], mine: _Row, theirs: _Row) -> dict[str, Any]:
    """Build a row of the table."""
    knobs, others = ({"samples": row.get("samples"), **(row.get("knobs") or {})} for row in (mine, theirs))
    unlike = [f"{name}={knobs[name]}, there {others[name]}" for name in knobs if knobs[name] != others.get(name, knobs[name])]
    unlike += ["intervals apart"] if _apart(mine, theirs) else []
    return {
        **{name: mine.get(name) for name in names},
        "unit": mine.get("unit"),
        "here": float(mine["value"]),
        "there": float(theirs["value"]),
        "ratio": mine["value"] / theirs["value"] if theirs["value"] else None,
        "not the same": "; ".join(unlike),
    }
