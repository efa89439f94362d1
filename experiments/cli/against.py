"""Compare a measurement, when it ends, with the committed record of the same name or with a record that the user names."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib

from experiments.cli.plot import RECORDS_PACKAGE, read_record

RECORDS = (
    pathlib.Path(__file__).resolve().parents[2] / "docs" / "records"
)  # a checkout has it, an installation does not
_SHORT = 40  # rows that a command prints when it ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Against:
    """The record that a measurement is compared with when it ends.

    Attributes:
        against: record or result folder to compare with, row by row, when all is measured (default: in a checkout, the
            one of docs/records whose name --out has)

    Raises:
        ValueError: the path does not exist.
    """

    against: pathlib.Path | None = None

    def __post_init__(self) -> None:
        if self.against is not None and not self.against.exists():
            raise ValueError(
                f"--against: expected a record or a result folder, got {self.against}, which does not exist"
            )

    def show(self, made: pathlib.Path, name: str = "") -> None:
        """Print the comparison of a new record; print nothing if there is no record to compare it with.

        Args:
            made: the record, a result folder, or a folder of records.
            name: the committed record's name, if it differs from the file's or the folder's.
        """
        if made.is_dir() and not (made / "metrics.json").is_file():
            for file in sorted(made.glob("*.json")):
                other = self.against / file.name if self.against else committed(file, f"{made.name}/{file.stem}")
                _print(file, other if other and other.exists() else None)
        else:
            _print(made, self.against or committed(made, name))


def _print(made: pathlib.Path, other: pathlib.Path | None) -> None:
    if other is not None:
        print(f"\n{compared(made, other, _SHORT)}")


def committed(made: pathlib.Path, name: str = "", records: pathlib.Path = RECORDS) -> pathlib.Path | None:
    """Find the committed record of the same name and the same experiment; None if there is none.

    Args:
        made: the record or result folder to compare; a committed record is not compared with itself.
        name: the committed record's name, such as "speed" or "ablations/votes" (default: the file's or the folder's).
        records: the folder of the committed records.

    Raises:
        ValueError: ``made`` is no record.
    """
    experiment = read_record(made)["experiment"]
    name = name or (made.name if made.is_dir() else made.stem)
    for path in (records / f"{name}.json", records / "results" / name, records / "fidelity" / name):
        file = path / "metrics.json" if path.is_dir() else path
        if file.is_file() and path.resolve() != made.resolve() and read_record(path)["experiment"] == experiment:
            return path
    return None


def compared(made: pathlib.Path, other: pathlib.Path, most: int | None = None) -> str:
    """Show the rows that two records share, with both values and their ratio, as text.

    Args:
        made: a record or result folder.
        other: the record to compare ``made`` with.
        most: rows that are shown; None shows all.

    Raises:
        ValueError: a path holds no record, or the two records are of different experiments.
    """
    names = (_shown(made), _shown(other))
    return importlib.import_module(RECORDS_PACKAGE).beside(read_record(made), read_record(other), names, most)


def _shown(path: pathlib.Path) -> str:
    """Shorten a path for people: relative to the current directory, if it lies there."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
