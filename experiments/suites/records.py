"""Records of the files that users bring, and errors that say which file, which line, what was got, what was expected."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Record:
    """One JSON object or table row, with its place.

    Attributes:
        where: file and line, or file and entry, for messages.
        values: field -> value.
    """

    where: str
    values: Mapping[str, Any]

    def error(self, message: str) -> ValueError:
        """An error that begins with the record's place."""
        return ValueError(f"{self.where}: {message}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def get(self, name: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        """A field's value.

        Args:
            name: the field.
            kinds: types that will do.
            expected: these types in words, for the message.

        Returns:
            The value.

        Raises:
            ValueError: the field is missing or of another type.
        """
        if name not in self.values:
            raise self.error(f"expected a field {name!r} ({expected}), got the fields {sorted(map(str, self.values))}")
        value = self.values[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise self.error(f"expected {expected} in the field {name!r}, got {_shown(value)}")
        return value

    def text(self, name: str) -> str:
        """A field that is a text; ValueError if it is not."""
        return self.get(name, str, "a text")

    def texts(self, name: str, at_least: int = 1) -> tuple[str, ...]:
        """A field that is a text or a number, or a list of such, as texts.

        Args:
            name: the field.
            at_least: how many there have to be.

        Returns:
            The texts.

        Raises:
            ValueError: the field is missing, of another type, or too short.
        """
        value = self.get(name, (str, int, float, list), "a text or a list of texts")
        listed = value if isinstance(value, list) else [value]
        for item in listed:
            if not isinstance(item, (str, int, float)) or isinstance(item, bool):
                raise self.error(f"expected texts in the field {name!r}, got {_shown(item)} among them")
        if len(listed) < at_least:
            raise self.error(f"expected at least {at_least} texts in the field {name!r}, got {len(listed)}")
        return tuple(map(str, listed))


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def check_file(path: Path) -> None:
    """Raises ValueError if `path` is not a file."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, got {'a folder' if path.is_dir() else 'nothing at this path'}")


def read_jsonl(path: Path, limit: int | None = None) -> list[Record]:
    """Reads a file of one JSON object per line; empty lines are passed over.

    Args:
        path: the file, in UTF-8.
        limit: how many records to read at most; later lines are not looked at.

    Returns:
        At least one record.

    Raises:
        ValueError: no such file, no record in it, or a line that is not a JSON object in UTF-8.
    """
    check_file(path)
    records = list(itertools.islice(_json_lines(path), limit))
    if not records:
        raise ValueError(f"{path}: expected at least one line with a JSON object, got an empty file")
    return records


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:  # bytes: only \n ends a line, whatever separators of Unicode the texts hold
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line, f"{path}, line {number}")


def _parsed(line: bytes, where: str) -> Record:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # of JSON or of UTF-8
        start = line[:40].decode("utf-8", "replace").strip()
        raise ValueError(f"{where}: expected a JSON object, got a damaged line ({error}): {start!r}...") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {_shown(value)}")
    return Record(where, value)


def read_json_list(path: Path, limit: int | None = None) -> list[Record]:
    """Reads a file that is one JSON list of objects.

    Args:
        path: the file, in UTF-8.
        limit: how many records to return at most.

    Returns:
        At least one record.

    Raises:
        ValueError: no such file, damaged JSON, anything but a list of objects, or an empty list.
    """
    check_file(path)
    try:
        entries = json.loads(path.read_bytes().decode("utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON list of objects, got a damaged file ({error})") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected a JSON list of at least one object, got {_shown(entries)}")
    for number, entry in enumerate(entries[:limit], 1):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, entry {number}: expected a JSON object, got {_shown(entry)}")
    return [Record(f"{path}, entry {number}", entry) for number, entry in enumerate(entries[:limit], 1)]
