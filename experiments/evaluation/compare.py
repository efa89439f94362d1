"""Compare methods with Full, or with --reference, example by example; or two records row by row; or show a record.

FOLDERS are result folders of eval; or a record of another experiment, such as speed, and the record to compare it with. In a
checkout, a record alone is compared with the one of its name in docs/records; if there is no such record, the command shows
what the record holds. --against puts any two records side by side, result folders too: both values of each
row, their ratio, and whether 95 % intervals of scores overlap. Records may differ in the seed.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from experiments.cli import Job, naming, option, read_record
from experiments.evaluation.comparison import BASELINE
from experiments.evaluation.tables import csv_report, report
from experiments.records import beside, csv_table, describe, write_bytes

RECORDS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "records"  # an installation lacks it


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """What to compare.

    Attributes:
        folders: result folders of eval; or one or two records of another experiment
        reference: a method of result folders with which the others are compared: its label, or its name if it has one setting
        against: a record or a result folder, whose rows are put beside those of the only other one
        format: markdown; or csv, a line for each cell or row with plain numbers (default: csv if --out ends in .csv)
        out: file to write (default: standard output)
    """

    folders: tuple[pathlib.Path, ...] = option(positional=True)
    reference: str = BASELINE
    against: pathlib.Path | None = None
    format: str | None = option(None, choices=(None, "markdown", "csv"))
    out: pathlib.Path | None = None

    @property
    def is_csv(self) -> bool:
        """Whether the table is written as comma-separated values."""
        return self.format == "csv" or (self.format is None and self.out is not None and self.out.suffix == ".csv")


def _compare(command: CompareCommand) -> None:
    record = read_record(command.folders[0])
    if record["experiment"] == "eval" and command.against is None:
        text = (csv_report if command.is_csv else report)(command.folders, command.reference)
    elif command.reference != BASELINE:
        raise ValueError(f"--reference is for result folders of eval, got {command.reference} and records")
    else:
        text = _records(command, record)
    if command.out is None:
        print(text, end="")
    else:
        write_bytes(command.out, text.encode())
        print(f"written: {command.out}", file=sys.stderr)


def _records(command: CompareCommand, record: Mapping[str, Any]) -> str:
    """Compare two records row by row, or show one."""
    first, *others = [*command.folders, *([] if command.against is None else [command.against])]
    if len(others) > 1 or (others and command.is_csv):
        raise ValueError(f"records are compared two at a time and as text, got {1 + len(others)}")
    if command.is_csv:
        return csv_table(record["metrics"])
    other = others[0] if others else committed(first)
    return f"{describe(record) if other is None else compared(first, other)}\n"


def committed(record: pathlib.Path, records: pathlib.Path = RECORDS) -> pathlib.Path | None:
    """Find the committed record of the same name and experiment; None if there is none, or if it is this one."""
    experiment, name = read_record(record)["experiment"], record.name if record.is_dir() else record.stem
    for path in (records / f"{name}.json", records / "results" / name, records / "fidelity" / name):
        file = path / "metrics.json" if path.is_dir() else path
        if file.is_file() and path.resolve() != record.resolve() and read_record(path)["experiment"] == experiment:
            return path
    return None


def compared(record: pathlib.Path, other: pathlib.Path) -> str:
    """Show the rows that two records of one experiment share, with both values and their ratio, as text."""
    with naming(record, other):
        return beside(read_record(record), read_record(other), (_shown(record), _shown(other)))


def _shown(path: pathlib.Path) -> str:
    """Shorten a path for people: relative to the current directory, if it lies there."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


main = Job(_compare, CompareCommand)


if __name__ == "__main__":
    sys.exit(main())
