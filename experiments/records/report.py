"""Tables of a record's rows by declared columns."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from experiments.records.tables import markdown_rows

Row = Mapping[str, Any]
# The field of a row; a field, the factor that it is shown in, and its format; or a function of the row.
Column = str | tuple[str, float, str] | Callable[[Row], Any]


def row_table(rows: Iterable[Row], columns: Mapping[str, Column]) -> list[str]:
    """Format the lines of a Markdown table, with a column for each title; an absent value and None give an empty cell."""
    return markdown_rows([tuple(columns), *([_cell(row, column) for column in columns.values()] for row in rows)])


def _cell(row: Row, column: Column) -> Any:
    if callable(column):
        value = column(row)
    elif isinstance(column, str):
        value = row.get(column)
    else:
        field, scale, style = column
        value = None if row.get(field) is None else format(row[field] * scale, style)
    return "" if value is None else value
