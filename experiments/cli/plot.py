"""Draw the figures of a result folder or of a JSON record of any experiment.

The figure with the experiment's own name is written as RECORD.png, every other figure as RECORD-NAME.png.
"""

import contextlib
import dataclasses
import functools
import importlib
import json
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments.cli.job import Job
from experiments.cli.settings import nearest, option

# The package that draws an experiment's records; `python -m experiments.lab.plot` has the lab's. It exports
# `figures(record) -> (figures, usual)`: functions by name, without arguments, which return a figure or raise a ValueError
# if the record lacks its values; and the usual names.
PACKAGES: Mapping[str, str] = {"demo": "experiments.demo", "eval": "experiments.evaluation", "speed": "experiments.speed"}
_USUAL = ("png", "pdf")
RECORDS_PACKAGE = "experiments.records"  # it writes files and knows matplotlib


@dataclasses.dataclass(frozen=True)
class PlotCommand:
    """What to draw, and where to write it.

    Attributes:
        path: a result folder, or the JSON record of another experiment
        kind: which figure; repeatable (default: all that apply)
        out: directory (default: the folder, or the record's)
        format: comma-separated: png, pdf, svg
    """

    path: pathlib.Path = option(positional=True)
    kind: tuple[str, ...] = option((), repeat=True)
    out: pathlib.Path | None = None
    format: tuple[str, ...] = option(_USUAL, choices=("png", "pdf", "svg"))


def plot(command: PlotCommand, packages: Mapping[str, str] = PACKAGES) -> None:
    """Draw what the command asks for, and say on standard error what was written."""
    importlib.import_module(RECORDS_PACKAGE).check_installed()
    out = command.out or (command.path if command.path.is_dir() else command.path.parent)
    written = write_figures(command.path, command.kind, out, command.format, packages)
    files = ", ".join(str(path) for path in written) or "nothing, for no figure can show these rows"
    print(f"written: {files}", file=sys.stderr)


def write_figures(
    path: pathlib.Path,
    kinds: Sequence[str],
    out: pathlib.Path,
    formats: Sequence[str] = _USUAL,
    packages: Mapping[str, str] = PACKAGES,
) -> list[pathlib.Path]:
    """Draw and write some figures of a result folder or record, without names its usual ones, into a directory.

    Return the files. ``packages`` are as `PACKAGES`.
    """
    written = []
    for name, draw in figures(path, kinds, packages):
        for kind in formats:
            written.append(out / f"{name}.{kind}")
            importlib.import_module(RECORDS_PACKAGE).write_bytes(written[-1], draw(kind))
    return written


def figures(
    path: pathlib.Path, kinds: Sequence[str], packages: Mapping[str, str] = PACKAGES
) -> list[tuple[str, Callable[[str], bytes]]]:
    """List the figures of a result folder, or of a record, without names its usual ones.

    Returns each figure's file name without suffix, and a function of "png", "pdf" or "svg" that draws it and returns the
    bytes. A path without a result, and kinds that it cannot be drawn as, are refused by a ``ValueError``.
    """
    record = read_record(path)
    experiment = record["experiment"].partition(" ")[0]  # "ablation votes" is an ablation
    if experiment not in packages:
        raise ValueError(f"a record of {record['experiment']!r} has no figures here: {', '.join(packages)} have")
    with naming(path):
        known, usual = importlib.import_module(packages[experiment]).figures(record)
    for kind in kinds:
        if kind not in known:
            raise ValueError(f"{path} cannot be drawn as {kind!r}{nearest(kind, known)}, expected one of {', '.join(known)}")
    drawn = []
    for kind in kinds or usual:
        name = kind if path.is_dir() else path.stem if kind == experiment else f"{path.stem}-{kind}"
        drawn.append((name, functools.partial(_draw, path, known[kind])))
    return drawn


def _draw(path: pathlib.Path, draw: Callable[[], Any], kind: str) -> bytes:
    with naming(path):
        return importlib.import_module(RECORDS_PACKAGE).save(draw(), kind)


@contextlib.contextmanager
def naming(*paths: pathlib.Path) -> Iterator[None]:
    """Turn errors about absent or mistyped values of files into a sentence that names the files, or their folders."""
    try:
        yield
    except ValueError as error:  # a sentence of ours, or of a parser or a format
        if any(str(path) in str(error) for path in paths):
            raise
        raise ValueError(f"{' and '.join(map(str, paths))}: {error}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        got = f"{type(error).__name__}: {error}"
        raise ValueError(f"{' and '.join(map(str, paths))}: expected what its experiment writes, got {got}") from error


def read_record(path: pathlib.Path) -> dict[str, Any]:
    """Read the record in a result folder (its metrics.json) or in a JSON file.

    Raises:
        ValueError: the path holds no record.
    """
    file = path / "metrics.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is neither a folder with a metrics.json nor a JSON record")
    with naming(file):
        record = json.loads(file.read_text(encoding="utf-8-sig"))
        for name, kind in {"experiment": str, "settings": dict, "metrics": list}.items():
            if not isinstance(record[name], kind):
                raise TypeError(f"no record of an experiment: {name} is {record[name]!r:.40}")
        for name in ("device", "versions", "notes"):
            if not isinstance(record.get(name) or {}, dict):
                raise TypeError(f"{name} is {record[name]!r:.40}")
        for number, row in enumerate(record["metrics"], 1):
            if not isinstance(row, dict):
                raise TypeError(f"row {number}: expected an object, got {row!r:.60}")
        return importlib.import_module(RECORDS_PACKAGE).unfold(record)


main = Job(plot, PlotCommand)
