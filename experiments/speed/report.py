"""The tables of the records of `experiments.speed` and `experiments.speed.offload`, and the line printed for each row."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import method_title
from experiments.records.report import Column, row_table
from experiments.speed.rows import Row, failure, run_line, spread, titled

_LEGEND = (
    "TPOT: milliseconds per output token, median (least - most) of the repeats. Floor: bytes a step must read over the "
    "read bandwidth measured in the same run; ratio: TPOT over floor. Read: gigabytes per step, weights + cache by the "
    "method's own accounting. TB/s: these bytes over the time of the step. Of Full: how many times faster than Full in the "
    "same run, at the same length and batch; a factor in brackets is from another run. Cache: gigabytes allocated. Program: "
    "arguments, results and temporaries of the token loop, in gigabytes. On a mesh, all bytes and the floor belong to one "
    "device."
)
_MESH_LEGEND = (
    " Of one: the time over the time on one device, in brackets if the latter is from another run. Sums: the variant of sums "
    "over devices."
)
_SPLIT_LEGEND = (
    " Rest, method: milliseconds per token without the method (each layer answers with its query), and the remainder: "
    "rotation, storing, selection, attention, updates. A record of an earlier commit may tell attention apart."
)
_OFFLOAD_LEGEND = (
    "TPOT: milliseconds per output token, median (least - most). Resident: TPOT with everything on the device. "
    "Bus: megabytes that a step reads from host memory, over all rows and layers; GB/s: these bytes over the time by which "
    "the step is longer than the resident step, if the resident step was measured. Layers: number of layers with rows in "
    "host memory. Hot: share of the rows attended in these layers that have a copy on the device. Device, host: gigabytes "
    "of the cache."
)
_PROMPTS_LEGEND = (
    "Seconds to prefill a prompt into host memory, median (least - most); the largest device memory of the process, the "
    "weights in it, and the memory that the process was given; gigabytes of keys and values in host memory."
)


def head() -> str:
    """Format the head of the printed lines."""
    left = f"{'':9s} {'method':17s} {'length':>8s} {'rows':>4s}"
    return f"{left} {'median ms':>10s} {'floor':>9s} {'ratio':>6s} {'of full':>8s}"


def line(row: Row, others: Sequence[Row]) -> str:
    """Format a row as a printed line; ``others`` are all rows of the record, including Full's rows."""
    begin = f"{row['name']:9s} {row['method']:17s} {row['length']:8d} {row['batch']:4d}"
    where = "".join(f", {text}" for text in (row.get("mesh") or _alone(row, ""), row.get("sums")) if text)
    if row["error"] is not None:
        return f"{begin} {failure(row, 120)}{where}"
    floor, ratio = (f"{1e3 * row['floor']:9.3f}", f"{row['ratio']:6.3f}") if "floor" in row else (" " * 9, " " * 6)
    if text := of_one(row, others):
        where += f", {text} of one device"
    times = f"{1e3 * row['value']:10.3f} {floor} {ratio} {speedup(row, others):>8s}"
    return f"{begin} {times}  {row['wall_seconds']:.0f} s{where}"


def speedup(row: Row, others: Sequence[Row]) -> str:
    """Tell how many times faster a row is than Full with the same model, length and batch, or "".

    The factor stands in brackets if Full was measured in another run.
    """
    return _ratio(row, others, "x", method="full")


def of_one(row: Row, others: Sequence[Row]) -> str:
    """Tell the time of a row on a mesh over the time of the same row on one device, or "".

    The ratio stands in brackets if the row on one device was measured in another run.
    """
    return _ratio(row, others, mesh=None, sums=None) if row.get("mesh") else ""


def _ratio(row: Row, others: Sequence[Row], times: str = "", **differs: str | int | None) -> str:
    """Compare a row with the row that was measured with the same settings except ``differs``, in the same run if possible.

    The ratio is the row's time over the other's; with ``times``, which stands behind it, the other's time over the row's.
    """
    same = ("name", "model", "mesh", "sums", "method", "length", "batch", "parts", "queries", "chunk_size")
    wanted = {key: row.get(key) for key in same} | differs
    alike = [x for x in others if x["error"] is None and all(x.get(key) == value for key, value in wanted.items())]
    if row["error"] is not None or not alike:
        return ""
    other = min(alike, key=lambda x: x["run"] != row["run"])
    text = f"{other['value'] / row['value'] if times else row['value'] / other['value']:.2f}{times}"
    return text if other["run"] == row["run"] else f"({text})"


def _alone(row: Row, one: str) -> str:
    """Tell where a row without a mesh was measured: on ``one`` device, or on a part of the model."""
    return f"one of {row['parts']} parts, alone" if row.get("parts") else one


def speed_tables(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Write all tables of a record of `experiments.speed`, and a line for each run.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    models = dict.fromkeys(row["model"] for row in metrics)
    title = ", ".join(models) + (", time split" if metrics and metrics[0].get("split") else "")
    lines = [titled(f"Speed: {title}" if title else "Speed", metrics, notes), ""]
    lines += ["How long a step, a prompt or a layer takes under each method, beside the time that its bytes must take.", ""]
    for kind, (title, columns) in _kinds(metrics).items():
        for model in dict.fromkeys(row["model"] for row in metrics if row["name"] == kind):
            mine = [row for row in metrics if (row["name"], row["model"]) == (kind, model)]
            mine.sort(key=lambda row: (row["length"], row["batch"], row.get("queries", 1)))
            has = {name: any(row.get(name) for row in mine) for name in ("mesh", "sums", "split")}
            shown = {name: column for name, column in columns.items() if has.get(_ONLY_WITH.get(name, ""), True)}
            lines += [f"## {title}, {model}", "", *row_table(mine, shown), ""]
    if notes.get("largest_batch"):
        limits = {
            "model": "model",
            "method": _method,
            "length": "length",
            "rows": lambda row: f"{'at least ' if row.get('capped') else ''}{row['batch']}",
        }
        lines += ["## Largest batch that fits", "", *row_table(notes["largest_batch"], limits), ""]
    meshes, splits = (any(row.get(name) for row in metrics) for name in ("mesh", "split"))
    lines += [_LEGEND + _MESH_LEGEND * meshes + _SPLIT_LEGEND * splits, ""]
    for run, about in notes.get("runs", {}).items():
        lines.append(run_line(run, about, f", {about['read_bandwidth']['bytes_per_second'] / 1e12:.3f} TB/s read"))
    return "\n".join(lines) + "\n"


# Columns that stand in a table if some of its rows have the field.
_ONLY_WITH = {
    "sums": "sums", "mesh": "mesh", "of one": "mesh", "rest / method ms": "split",
}  # fmt: skip


def _kinds(metrics: Sequence[Row]) -> dict[str, tuple[str, dict[str, Column]]]:
    """Declare the tables of a record of `experiments.speed`: by the kind of row a title and the columns."""
    first: dict[str, Column] = {
        "sums": "sums",
        "mesh": lambda row: row.get("mesh") or _alone(row, "one device"),
        "method": _method,
        "length": "length",
    }
    last: dict[str, Column] = {
        "of one": lambda row: of_one(row, metrics),
        "of Full": lambda row: speedup(row, metrics),
        "compile s": ("compile_seconds", 1, ".1f"),
        "notes": _notes,
    }
    decode: dict[str, Column] = {
        "rows": "batch",
        "TPOT ms": lambda row: spread(row, 1e3, 3),
        "tokens/s": ("tokens_per_second", 1, ".1f"),
        "read GB": _read,
        "floor ms": ("floor", 1e3, ".3f"),
        "ratio": ("ratio", 1, ".3f"),
        "TB/s": ("achieved_bandwidth", 1e-12, ".2f"),
        "cache GB": ("cache_bytes", 1e-9, ".2f"),
        "program GB": ("program_bytes", 1e-9, ".2f"),
        "rest / method ms": _split,
    }
    prefill: dict[str, Column] = {
        "rows": "batch",
        "TTFT ms": lambda row: spread(row, 1e3, 3),
        "tokens/s": ("tokens_per_second", 1, ".0f"),
        "chunk": lambda row: row.get("read_at_once") or (row["chunk_size"] if row["error"] is None else None),
        "temporary GB": ("temporary_bytes", 1e-9, ".2f"),
    }
    attention: dict[str, Column] = {
        "queries": "queries",
        "ms per layer": lambda row: spread(row, 1e3, 3),
        "attended": ("attended_tokens", 1, ".0f"),
        "read MB": ("cache_bytes_read", 1e-6, ".3f"),
        "floor ms": ("floor", 1e3, ".4f"),
        "ratio": ("ratio", 1, ".2f"),
    }
    kinds = {"decode": ("Decode", decode), "prefill": ("Prefill", prefill), "attention": ("One layer's attention", attention)}
    return {kind: (title, first | columns | last) for kind, (title, columns) in kinds.items()}


def _method(row: Row) -> str:
    return method_title(row["method"])


def _read(row: Row) -> str | None:
    if row["error"] is not None:
        return None
    return f"{row['weight_bytes_read'] / 1e9:.2f} + {row['cache_bytes_read'] / 1e9:.3f}"


def _split(row: Row) -> str | None:
    parts = row.get("split")
    if parts is None:
        return None
    method = parts["method"] if "method" in parts else parts["select_and_attend"]
    attention = f", attention {1e3 * parts['attend']:.3f}" if parts.get("attend") else ""
    return f"{1e3 * parts['rest']:.3f} / {1e3 * method:.3f}{attention}"


def _notes(row: Row) -> str:
    if row["error"] is not None:
        return failure(row)
    counters = (f"{name.replace('_', ' ')} {value:.3g}" for name, value in row.get("counters", {}).items())
    excluded = f"without {row['excluded']}" if row.get("excluded") else ""
    return "; ".join(text for text in (row["note"], *counters, excluded) if text)


def offload_tables(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Write the tables of a record of `experiments.speed.offload`, and a line for each run.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    lines = [titled("Decoding from host memory", metrics, notes), ""]
    lines += ["How long a token takes when keys and values of some or all layers are in pinned host memory.", ""]
    for model in dict.fromkeys(row["model"] for row in metrics):
        mine = [row for row in metrics if row["model"] == model]
        mine.sort(key=lambda row: (row["length"], row["batch"], -row["share"]))
        steps = [row for row in mine if row["name"] != "prefill"]
        prompts = [row for row in mine if row["name"] == "prefill"]
        lines += [f"## {model}", ""]
        if steps:
            lines += [*row_table(_beside_resident(steps), _STEPS), ""]
        if prompts:
            lines += ["### Prompts", "", *row_table(prompts, _PROMPTS), ""]
    kinds = {row["name"] == "prefill" for row in metrics}
    for legend in [_OFFLOAD_LEGEND] * (False in kinds) + [_PROMPTS_LEGEND] * (True in kinds):
        lines += [legend, ""]
    for run, about in notes.get("runs", {}).items():
        link = notes.get("links", {}).get(run)
        lines.append(run_line(run, about, f", host to device {link / 1e9:.1f} GB/s" if link else ""))
    return "\n".join(lines) + "\n"


def _beside_resident(rows: Sequence[Row]) -> list[Row]:
    """Put the time of the resident row beside each offloaded row of equal settings, whose resident row is then left out."""
    shown = []
    for row in rows:
        key = {name: row[name] for name in ("method", "length", "batch")}
        alike = [x for x in rows if key.items() <= x.items() and x["error"] is None]
        resident = next((x["value"] for x in alike if x["name"] == "resident"), None)
        if row["error"] is None and row["name"] == "resident" and len(alike) > 1:
            continue
        shown.append({**row, "resident": resident if row["error"] is None else None})
    return shown


def _rate(row: Row) -> str | None:
    """Format the gigabytes over the bus in each second by which a step is longer than the resident step."""
    if row["name"] != "offload" or row["resident"] is None or not row["bus_bytes"] or row["value"] <= row["resident"]:
        return None
    return f"{row['bus_bytes'] / (row['value'] - row['resident']) / 1e9:.1f}"


def _of_offloaded(field: str, scale: float, style: str) -> Column:
    return lambda row: style.format(row[field] * scale) if row["name"] == "offload" and row["error"] is None else None


def _offload_note(row: Row) -> str:
    """Return a row's note without the part that holds for the whole table; for a failed row, why it has no value."""
    if row["error"] is not None:
        return failure(row, 80) if row["name"] == "prefill" else f"{row['name']}: {failure(row, 80)}"
    return "; ".join(part for part in row["note"].split("; ") if part != "offload=True")


_STEPS: dict[str, Column] = {
    "method": _method,
    "length": "length",
    "rows": "batch",
    "layers": "layers",
    "TPOT ms": lambda row: spread(row, 1e3, 3) if row["name"] == "offload" else None,
    "resident ms": ("resident", 1e3, ".3f"),
    "tokens/s": ("tokens_per_second", 1, ".1f"),
    "bus MB": _of_offloaded("bus_bytes", 1e-6, "{:.2f}"),
    "GB/s": _rate,
    "hot": _of_offloaded("hot", 100, "{:.1f} %"),
    "device GB": ("device_bytes", 1e-9, ".2f"),
    "host GB": ("host_bytes", 1e-9, ".2f"),
    "notes": _offload_note,
}
_PROMPTS: dict[str, Column] = {
    "method": _method,
    "length": "length",
    "rows": "batch",
    "chunk": "chunk_size",
    "seconds": lambda row: spread(row, 1, 2),
    "tokens/s": ("tokens_per_second", 1, ".0f"),
    "peak device GB": ("peak_bytes", 1e-9, ".1f"),
    "weights GB": ("weight_bytes", 1e-9, ".1f"),
    "given GB": ("device_limit", 1e-9, ".1f"),
    "host GB": ("host_bytes", 1e-9, ".1f"),
    "notes": _offload_note,
}
