"""``kvjax compare``: compare methods in result folders with Full, example by example, and other records row by row."""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from experiments.cli import Job, committed, compared, option, read_record
from experiments.evaluation.tables import csv_report, latex_report, report
from experiments.records import write_bytes

_BY_EXAMPLE = ("eval", "sweep")
_FORMATS = ("markdown", "csv", "latex")
_ENDINGS = {".csv": "csv", ".tex": "latex"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """What to compare.

    Attributes:
        folders: result folders of eval or sweep; or a record of another experiment, such as speed, and the record to compare
            it with (default: in a checkout, the record of the same name in docs/records)
        papers: also show the scores that papers print for the same model and tasks
        format: markdown; csv, a line for each cell with plain numbers; or latex, for the package booktabs (default: what the
            ending of --out says, .csv or .tex, else markdown)
        out: file to write (default: standard output)
    """

    folders: tuple[pathlib.Path, ...] = option(positional=True)
    papers: bool = False
    format: str | None = None
    out: pathlib.Path | None = None

    def __post_init__(self) -> None:
        if self.format not in (None, *_FORMATS):
            raise ValueError(f"--format takes {', '.join(_FORMATS)}, got {self.format!r}")

    @property
    def written_as(self) -> str:
        """The format of the table."""
        return self.format or _ENDINGS.get("" if self.out is None else self.out.suffix, "markdown")


def _compare(command: CompareCommand) -> None:
    kind = read_record(command.folders[0])["experiment"]
    text = _examples(command) if kind in _BY_EXAMPLE else _records(command)
    if command.out is None:
        print(text, end="")
    else:
        write_bytes(command.out, text.encode())
        print(f"written: {command.out}", file=sys.stderr)


def _examples(command: CompareCommand) -> str:
    if command.written_as == "markdown":
        return report(command.folders, papers=command.papers)
    if command.papers:
        raise ValueError(f"--papers is a table in Markdown, got --format {command.written_as}")
    return {"csv": csv_report, "latex": latex_report}[command.written_as](command.folders)


def _records(command: CompareCommand) -> str:
    """Compare two records that hold no answers."""
    made, *others = command.folders
    if command.written_as != "markdown":
        other = f"kvjax records {made} --format {command.written_as}"
        raise ValueError(f"a comparison of two records is text only; {other} writes the rows of one")
    if command.papers:
        raise ValueError(f"--papers has no meaning for {made}, which holds no scores of tasks")
    if len(others) > 1:
        raise ValueError(f"records are compared two at a time, got {len(command.folders)}")
    other = others[0] if others else committed(made)
    if other is None:
        raise ValueError(f"docs/records has no other record of the name of {made}: give the record to compare it with")
    return compared(made, other) + "\n"


main = Job(_compare, CompareCommand)


if __name__ == "__main__":
    sys.exit(main())
