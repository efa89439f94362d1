"""Parsers of a flag's text: names, numbers, pairs, the path of a record."""

from __future__ import annotations

import argparse
import pathlib


def names(text: str) -> tuple[str, ...]:
    """Split comma-separated names. Commas within round brackets, as in ``periodic(snapkv, interval=128)``, split nothing."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    parts = tuple(part.strip() for part in parts)
    if not all(parts) or depth:
        raise argparse.ArgumentTypeError(f"expected comma-separated names, got {text!r}")
    return parts


def numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers of at least 1."""
    try:
        parts = tuple(int(part) for part in text.split(","))
    except ValueError:
        parts = (0,)
    if min(parts) < 1:
        raise argparse.ArgumentTypeError(f"expected comma-separated whole numbers of at least 1, got {text!r}")
    return parts


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return number


def items(kind: type, text: str) -> tuple:
    """Parse comma-separated items of one type.

    Args:
        kind: str, int, float or `pathlib.Path`.
        text: the items with commas between them.
    """
    parts = [part.strip() for part in text.split(",")]
    words = {int: "whole numbers", float: "numbers"}.get(kind, "names")
    try:
        if not all(parts):
            raise ValueError("an empty item")
        return tuple(kind(part) for part in parts)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected {words} with commas between them, got {text!r}") from error


def pair(text: str) -> dict[str, str | bool | None]:
    """Parse ``NAME=VALUE`` as one value by name; true, false and none become Python's values, all else is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    words = {"true": True, "false": False, "none": None}
    return {name.strip(): words.get(value.lower(), value)}


def record_path(text: str) -> pathlib.Path:
    """Parse the path of a JSON record; its table and its figure get the same name with other suffixes."""
    path = pathlib.Path(text)
    if path.suffix != ".json" or path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file that ends in .json, got {text!r}")
    return path
