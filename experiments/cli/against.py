"""Compare a measurement, when it ends, with the committed record of the same name or with a record that the user names."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib

from experiments.cli.plot import RECORDS_PACKAGE, read_record

RECORDS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "records"  # an installation lacks it
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
            raise ValueError(f"--against: expected a record or a result folder, got {self.against}, which does not exist")

    def show(self, record: pathlib.Path, name: str = "") -> None:
        """Print the comparison of a new record, result folder or folder of records.

        Nothing if there is none to compare it with. ``name`` is the committed record's name, if it differs from the file's
        or the folder's.
        """
        if record.is_dir() and not (record / "metrics.json").is_file():
            for file in sorted(record.glob("*.json")):
                other = self.against / file.name if self.against else committed(file, f"{record.name}/{file.stem}")
                _print(file, other if other and other.exists() else None)
        else:
            _print(record, self.against or committed(record, name))


def _print(record: pathlib.Path, other: pathlib.Path | None) -> None:
    if other is not None:
        print(f"\n{compared(record, other, _SHORT)}")


def committed(record: pathlib.Path, name: str = "", records: pathlib.Path = RECORDS) -> pathlib.Path | None:
    """Find the committed record of the same name and experiment, in docs/records.

    None if there is none, or if it is this one. The name, such as "speed" or "ablations/votes", is by default the file's or
    the folder's.
    """
    experiment = read_record(record)["experiment"]
    name = name or (record.name if record.is_dir() else record.stem)
    for path in (records / f"{name}.json", records / "results" / name, records / "fidelity" / name):
        file = path / "metrics.json" if path.is_dir() else path
        if file.is_file() and path.resolve() != record.resolve() and read_record(path)["experiment"] == experiment:
            return path
    return None


def compared(record: pathlib.Path, other: pathlib.Path, most: int | None = None) -> str:
    """Show the rows that two records of one experiment share, with both values and their ratio, as text.

    At most ``most`` rows.
    """
    names = (_shown(record), _shown(other))
    return importlib.import_module(RECORDS_PACKAGE).beside(read_record(record), read_record(other), names, most)


def _shown(path: pathlib.Path) -> str:
    """Shorten a path for people: relative to the current directory, if it lies there."""
    here = pathlib.Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
