"""Fold records in place: what rows have in common stands once. All that reads records unfolds them."""

import dataclasses
import pathlib
import sys

from experiments.cli import Job, option, read_record
from experiments.records import fold, write_record


@dataclasses.dataclass(frozen=True)
class FoldCommand:
    """Which records to fold.

    Attributes:
        files: JSON records
    """

    files: tuple[pathlib.Path, ...] = option(positional=True)


def _fold(command: FoldCommand) -> None:
    for file in command.files:
        write_record(file, fold(read_record(file)))


main = Job(_fold, FoldCommand)


if __name__ == "__main__":
    sys.exit(main())
