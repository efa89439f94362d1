"""The report of `experiments.speed` on a record: a printed line for each row as it is finished, and markdown tables."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.records import markdown_rows, method_title
from experiments.speed.rows import Row, failure, run_line, scaled, spread, titled

_LEGEND = (
    "TPOT: milliseconds per output token, median (least - most) of the repeats. Floor: bytes a step must read over the "
    "read bandwidth measured in the same run; ratio: TPOT over floor. Read: gigabytes per step, weights + cache by the "
    "method's own accounting. TB/s: these bytes over the time of the step. Of Full: how many times faster than Full in the "
    "same run, at the same length and batch; a factor in brackets is from another run. Cache: gigabytes allocated. Program: "
    "arguments, results and temporaries of the token loop, in gigabytes. On a mesh, all bytes and the floor belong to one "
    "device."
)
_MESH_LEGEND = (
    " Of one: the time over the time on one device, in brackets if the latter is from another run. Of part: the time over "
    "the time of one device's part of the model alone, which waits for no sum. Sums: the variant of sums over devices."
)
_SPLIT_LEGEND = (
    " Rest, attend, select: milliseconds per token without the method's attention (each layer answers with its query), in "
    "attention over a fixed selection (the rows are "
    "gathered inside that kernel), and the remainder (rotation, storing, selection, updates); `s+a` where the last two "
    "cannot be told apart."
)
_KINDS = {"decode": "Decode", "prefill": "Prefill", "attention": "One layer's attention"}


def head() -> str:
    """Format the head of the printed lines."""
    left = f"{'':9s} {'method':17s} {'length':>8s} {'rows':>4s}"
    return f"{left} {'median ms':>10s} {'floor':>9s} {'ratio':>6s} {'of full':>8s}"


def line(row: Row, others: Sequence[Row]) -> str:
    """Format a row as a printed line.

    Args:
        row: the row.
        others: all rows of the record, including Full's rows.
    """
    begin = f"{row['name']:9s} {row['method']:17s} {row['length']:8d} {row['batch']:4d}"
    where = "".join(f", {text}" for text in (row.get("mesh") or _alone(row, ""), row.get("sums")) if text)
    if row["error"] is not None:
        return f"{begin} {failure(row, 120)}{where}"
    floor, ratio = (f"{1e3 * row['floor']:9.3f}", f"{row['ratio']:6.3f}") if "floor" in row else (" " * 9, " " * 6)
    end = where + (f", {told} of one device" if (told := of_one(row, others)) else "")
    end += f", {told} of a part alone" if (told := of_part(row, others)) else ""
    return f"{begin} {1e3 * row['value']:10.3f} {floor} {ratio} {speedup(row, others):>8s}  {row['wall_seconds']:.0f} s{end}"


def speedup(row: Row, others: Sequence[Row]) -> str:
    """Tell how many times faster a row is than Full with the same model, length and batch, or "".

    The factor stands in brackets if Full was measured in another run.
    """
    full = _like(row, others, method="full")
    return "" if full is None else _of_run(f"{full['value'] / row['value']:.2f}x", full, row)


def of_one(row: Row, others: Sequence[Row]) -> str:
    """Tell the time of a row on a mesh over the time of the same row on one device, or "".

    The ratio stands in brackets if the row on one device was measured in another run.
    """
    one = _like(row, others, mesh=None, sums=None) if row.get("mesh") else None
    return "" if one is None else _of_run(f"{row['value'] / one['value']:.2f}", one, row)


def of_part(row: Row, others: Sequence[Row]) -> str:
    """Tell the time of a row on a mesh over the time of one device's part of the model alone, or "", as `of_one`."""
    found = re.search(r"model=(\d+)", row.get("mesh") or "")
    part = _like(row, others, mesh=None, sums=None, parts=int(found[1])) if found else None
    return "" if part is None else _of_run(f"{row['value'] / part['value']:.2f}", part, row)


def _alone(row: Row, one: str) -> str:
    """Tell where a row without a mesh was measured: on ``one`` device, or on a part of the model."""
    return f"one of {row['parts']} parts, alone" if row.get("parts") else one


def _like(row: Row, others: Sequence[Row], **differs: str | int | None) -> Row | None:
    """Find a row that was measured with the same settings except ``differs``, in the same run if possible."""
    same = ("name", "model", "mesh", "sums", "method", "length", "batch", "parts", "queries", "chunk_size")
    wanted = {key: row.get(key) for key in same} | differs
    found = [x for x in others if x["error"] is None and all(x.get(key) == value for key, value in wanted.items())]
    return min(found, key=lambda x: x["run"] != row["run"], default=None) if row["error"] is None else None


def _of_run(text: str, other: Row, row: Row) -> str:
    return text if other["run"] == row["run"] else f"({text})"


def speed_tables(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Write all tables of a record, and a line for each run.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    models = dict.fromkeys(row["model"] for row in metrics)
    title = ", ".join(models) + (", time split" if _splits([metrics[0]]) else "") if metrics else ""
    lines = [titled(f"Speed: {title}" if title else "Speed", metrics, notes), ""]
    lines += ["How long a step, a prompt or a layer takes under each method, beside the time that its bytes must take.", ""]
    for kind, title in _KINDS.items():
        for model in dict.fromkeys(row["model"] for row in metrics if row["name"] == kind):
            mine = [row for row in metrics if (row["name"], row["model"]) == (kind, model)]
            mine.sort(key=lambda row: (row["length"], row["batch"], row.get("queries", 1)))
            table = {name: show for name, show in _COLUMNS[kind].items() if show is not _split or _splits(mine)}
            if any(row.get("mesh") for row in mine):
                table = {"mesh": lambda row, others: row.get("mesh") or _alone(row, "one device"), **table}
                last = {name: table.pop(name) for name in _LAST}
                parts = {"of part": of_part} if any(row.get("parts") for row in mine) else {}
                table |= {"of one": of_one, **parts, **last}
            if any(row.get("sums") for row in mine):
                table = {"sums": lambda row, others: row.get("sums") or "", **table}
            body = [[show(row, metrics) if _shown(row, name) else "" for name, show in table.items()] for row in mine]
            lines += [f"## {title}, {model}", "", *markdown_rows([tuple(table), *body]), ""]
    if notes.get("largest_batch"):
        body = [
            [x["model"], method_title(x["method"]), x["length"], f"{'at least ' if x.get('capped') else ''}{x['batch']}"]
            for x in notes["largest_batch"]
        ]
        lines += ["## Largest batch that fits", "", *markdown_rows([("model", "method", "length", "rows"), *body]), ""]
    meshes = any(row.get("mesh") for row in metrics)
    lines += [_LEGEND + _MESH_LEGEND * meshes + (_SPLIT_LEGEND if _splits(metrics) else ""), ""]
    for run, about in notes.get("runs", {}).items():
        speed = about["read_bandwidth"]["bytes_per_second"] / 1e12
        lines.append(run_line(run, about, f", {speed:.3f} TB/s read"))
    return "\n".join(lines) + "\n"


def _shown(row: Row, column: str) -> bool:
    return row["error"] is None or column in ("mesh", "sums", "method", "length", "rows", "queries", "notes")


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.3f}"


def _spread(row: Row, others: Sequence[Row]) -> str:
    return spread(row, 1e3, 3)


def _notes(row: Row, others: Sequence[Row]) -> str:
    if row["error"] is not None:
        return failure(row)
    counters = (f"{name.replace('_', ' ')} {value:.3g}" for name, value in row.get("counters", {}).items())
    excluded = f"without {row['excluded']}" if row.get("excluded") else ""
    return "; ".join(text for text in (row["note"], *counters, excluded) if text)


def _splits(metrics: Sequence[Row]) -> bool:
    return any(row.get("split") for row in metrics)


def _split(row: Row, others: Sequence[Row]) -> str:
    parts = row.get("split")
    if parts is None:
        return ""
    if parts["attend"] is None:
        return f"{_ms(parts['rest'])} / s+a {_ms(parts['select_and_attend'])}"
    return " / ".join(_ms(parts[name]) for name in ("rest", "attend", "select"))


def _field(name: str, scale: float, style: str) -> Callable[[Row, Sequence[Row]], str]:
    return lambda row, others: scaled(row.get(name), scale, style)


_FIRST = {
    "method": lambda row, others: method_title(row["method"]),
    "length": lambda row, others: row["length"],
}
_ROWS = {"rows": lambda row, others: row["batch"]}
_LAST = {
    "of Full": speedup,
    "compile s": _field("compile_seconds", 1, ".1f"),
    "notes": _notes,
}
_COLUMNS: dict[str, dict[str, Callable[[Row, Sequence[Row]], Any]]] = {
    "decode": {
        **_FIRST,
        **_ROWS,
        "TPOT ms": _spread,
        "tokens/s": _field("tokens_per_second", 1, ".1f"),
        "read GB": lambda row, others: f"{row['weight_bytes_read'] / 1e9:.2f} + {row['cache_bytes_read'] / 1e9:.3f}",
        "floor ms": _field("floor", 1e3, ".3f"),
        "ratio": _field("ratio", 1, ".3f"),
        "TB/s": _field("achieved_bandwidth", 1e-12, ".2f"),
        "cache GB": _field("cache_bytes", 1e-9, ".2f"),
        "program GB": _field("program_bytes", 1e-9, ".2f"),
        "rest / attend / select ms": _split,
        **_LAST,
    },
    "prefill": {
        **_FIRST,
        **_ROWS,
        "TTFT ms": _spread,
        "tokens/s": _field("tokens_per_second", 1, ".0f"),
        "chunk": lambda row, others: row.get("read_at_once") or row["chunk_size"],
        "temporary GB": _field("temporary_bytes", 1e-9, ".2f"),
        **_LAST,
    },
    "attention": {
        **_FIRST,
        "queries": lambda row, others: row["queries"],
        "ms per layer": _spread,
        "attended": _field("attended_tokens", 1, ".0f"),
        "read MB": _field("cache_bytes_read", 1e-6, ".3f"),
        "floor ms": _field("floor", 1e3, ".4f"),
        "ratio": _field("ratio", 1, ".2f"),
        **_LAST,
    },
}
