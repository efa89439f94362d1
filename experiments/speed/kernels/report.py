"""The report of `experiments.speed.kernels`: a printed line for each row as it is finished, and a markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import markdown_rows
from experiments.speed.rows import Row, failure, run_line, spread, titled


def line(row: Row) -> str:
    """Format a row as a printed line."""
    begin = f"{row['name']:17s} {row['implementation']:24s} {row['shape']:52s}"
    if row["error"] is not None:
        return f"{begin} {failure(row, 160)}"
    off = "differs" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
    verdict = "" if row["passed"] else f"  WRONG: {row.get('wrong') or 'too large'}"
    if row["value"] is None:
        return f"{begin} error {off}{verdict}"
    return f"{begin} {1e6 * row['value']:10.1f} us, {row['ratio']:8.2f} of its floor, error {off}{verdict}"


def kernel_table(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Write the table of a record, and a line for each run.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    table: list[Sequence[Any]] = [
        ("operation", "shape", "implementation", "us, median (least - most)", "floor us", "ratio", "relative error")
    ]
    for row in metrics:
        begin = (row["name"], row["shape"], row["implementation"])
        if row["error"] is not None:
            table.append((*begin, failure(row, 160), "", "", ""))
            continue
        off = "differs" if row["relative_error"] is None else f"{row['relative_error']:.1e}"
        off += "" if row["passed"] else " (too large)"
        if row["value"] is None:
            table.append((*begin, "not timed", "", "", off))
            continue
        table.append((*begin, spread(row, 1e6, 1), f"{1e6 * row['floor']:.1f}", f"{row['ratio']:.2f}", off))
    runs = [
        run_line(name, about, f", {about['read_bandwidth'] / 1e12:.3f} TB/s read" if about["read_bandwidth"] else "")
        for name, about in notes.get("runs", {}).items()
        if name in {row["run"] for row in metrics}
    ]
    legend = (
        "Floor: the bytes an operation must read over the read bandwidth measured in the same run; data that stays in a "
        "cache between the runs of a loop can be read faster. Relative error: against a reference in float32; for "
        "rerank and the operations on packed vectors, against their xla implementation on the same arguments."
    )
    about = "How long every implementation of every operation takes at the shapes of an 8B model, beside its floor."
    return "\n".join([titled("Kernels", metrics, notes), "", about, "", *markdown_rows(table), "", legend, "", *runs]) + "\n"
