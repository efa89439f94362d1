"""What the commands that time things take: lists of names and numbers, a JSON record; and how they refuse."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
from collections.abc import Iterator


def names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected comma-separated names, got {text!r}")
    return found


def numbers(text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers of at least 1."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = (0,)
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected comma-separated whole numbers of at least 1, got {text!r}")
    return found


def positive(text: str) -> int:
    """A whole number of at least 1."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return found


def record_path(text: str) -> pathlib.Path:
    """Where a record goes; its table and figure get the same name with other endings."""
    path = pathlib.Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file that ends in .json, got {text!r}")
    return path


@contextlib.contextmanager
def refusals(parser: argparse.ArgumentParser) -> Iterator[None]:
    """While requests are read: a ``ValueError`` ends the program with one line, before anything is measured."""
    try:
        yield
    except ValueError as error:
        parser.error(str(error))
