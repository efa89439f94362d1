"""Compare methods with Full, example by example; or two records of speed and other experiments row by row; or show a record.

FOLDERS are result folders of eval; or a record of another experiment, such as speed, and the record to compare it with. In a
checkout, a record alone is compared with the one of its name in docs/records. With --fields, or if there is no such record,
the command shows what the record holds.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from experiments.cli import Job, committed, compared, option, read_record
from experiments.evaluation.tables import csv_report, latex_report, report
from experiments.records import describe, record_csv, record_latex, write_bytes

_FORMATS = ("markdown", "csv", "latex")
_ENDINGS = {".csv": "csv", ".tex": "latex"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """What to compare.

    Attributes:
        folders: result folders of eval; or one or two records of another experiment
        fields: comma-separated, the columns of the table of a record (default: those that tell rows apart)
        format: markdown; csv, a line for each cell or row with plain numbers; or latex, for the package booktabs (default:
            what the ending of --out says, .csv or .tex, else markdown)
        out: file to write (default: standard output)
    """

    folders: tuple[pathlib.Path, ...] = option(positional=True)
    fields: tuple[str, ...] = ()
    format: str | None = option(None, choices=(None, *_FORMATS))
    out: pathlib.Path | None = None

    @property
    def written_as(self) -> str:
        """The format of the table."""
        return self.format or _ENDINGS.get("" if self.out is None else self.out.suffix, "markdown")


def _compare(command: CompareCommand) -> None:
    record = read_record(command.folders[0])
    by_example = record["experiment"] == "eval" and not command.fields
    text = _examples(command) if by_example else _records(command, record)
    if command.out is None:
        print(text, end="")
    else:
        write_bytes(command.out, text.encode())
        print(f"written: {command.out}", file=sys.stderr)


def _examples(command: CompareCommand) -> str:
    return {"markdown": report, "csv": csv_report, "latex": latex_report}[command.written_as](command.folders)


def _records(command: CompareCommand, record: Mapping[str, Any]) -> str:
    """Compare two records that hold no answers, or show one."""
    first, *others = command.folders
    if command.fields or command.written_as != "markdown":
        if others:
            raise ValueError(f"a comparison of two records is text without --fields and --format, got {len(command.folders)}")
        show = {"markdown": describe, "csv": record_csv, "latex": record_latex}[command.written_as]
        return show(record, command.fields).rstrip("\n") + "\n"
    if len(others) > 1:
        raise ValueError(f"records are compared two at a time, got {len(command.folders)}")
    other = others[0] if others else committed(first)
    return f"{describe(record) if other is None else compared(first, other)}\n"


main = Job(_compare, CompareCommand)


if __name__ == "__main__":
    sys.exit(main())
