"""Records of users' files, and errors that name the file, the line, what was found and what was expected."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.benchmarks.base import Example, check_name
from experiments.benchmarks.scorers import fitted
from experiments.tasks import check_unicode, reference_text


@dataclasses.dataclass(frozen=True)
class Record:
    """A JSON object or a row of a table, with the file and line that it comes from.

    Attributes:
        where: file and line, or file and entry, for messages.
        values: values by field.
    """

    where: str
    values: Mapping[str, Any]

    def error(self, message: str) -> ValueError:
        """Build an error whose message begins with the record's file and line."""
        return ValueError(f"{self.where}: {message}")

    def has(self, name: str) -> bool:
        """Tell whether the field exists and is neither null nor NaN, which tables write for an absent value."""
        value = self.values.get(name)
        return value is not None and not (isinstance(value, float) and math.isnan(value))

    def get(self, name: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        """Return a field's value.

        Args:
            name: the field.
            kinds: the types that are allowed.
            expected: the allowed types in words, for the message.

        Raises:
            ValueError: the field is missing or of another type.
        """
        if name not in self.values:
            raise self.error(f"expected a field {name!r} ({expected}), got the fields {sorted(map(str, self.values))}")
        value = self.values[name]
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise self.error(f"expected {expected} in the field {name!r}, got {shown(value)}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(f"expected {expected} in the field {name!r}, got the number {value}")
        return value

    def text(self, name: str) -> str:
        """Return the text in a field; ValueError if the field holds no text."""
        value = self.get(name, str, "a text")
        with self.named(name):
            check_unicode(value)
        return value

    def texts(self, name: str, *, decimals: bool = False) -> tuple[str, ...]:
        """Return a field as texts; the field may hold a text, a number, or a list of texts and numbers.

        Args:
            name: the field.
            decimals: see `experiments.tasks.reference_text`.

        Raises:
            ValueError: the field is missing, of another type, an empty list, or a text is blank.
        """
        value = self.get(name, (str, int, float, list), "a text or a list of texts")
        listed = value if isinstance(value, list) else [value]
        if not listed:
            raise self.error(f"expected at least one text in the field {name!r}, got an empty list")
        with self.named(name):
            return tuple(reference_text(item, decimals=decimals) for item in listed)

    @contextlib.contextmanager
    def named(self, field: str = "") -> Iterator[None]:
        """Put the record's file and line, and a field if one is named, before the message of a ValueError."""
        try:
            yield
        except ValueError as error:
            raise self.error(f"field {field!r}: {error}" if field else str(error)) from error

    def fitted(self, example: Example) -> Example:
        """Return the record's example with references as its scorer expects them; ValueError if they are none."""
        with self.named():
            return fitted(example)


def shown(value: Any) -> str:
    """Show a value in a message: its type, and at most 60 characters."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def check_file(path: Path) -> None:
    """Refuse a path that is not a file, with a ValueError."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, got {'a folder' if path.is_dir() else 'nothing at this path'}")


def parse_json(data: bytes) -> Any:
    """Parse JSON in UTF-8, with or without a byte-order mark.

    Raises:
        ValueError: it is no JSON or not in UTF-8, or an object has a key twice. (Python would take the last value.)
        RecursionError: it is nested too deeply.
    """
    return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        twice = [name for name, times in collections.Counter(name for name, _ in pairs).items() if times > 1]
        raise ValueError(f"expected keys once, got {twice[0]!r:.60} twice")
    return mapping


def read_jsonl(path: Path, limit: int | None = None) -> list[Record]:
    """Read a file that has a JSON object in each line; empty lines are skipped."""
    check_file(path)
    records = list(itertools.islice(_json_lines(path), limit))
    if not records:
        raise ValueError(f"{path}: expected at least one line with a JSON object, got an empty file")
    return records


def read_examples(path: Path, limit: int | None, make: Callable[[Record], Example]) -> list[Example]:
    """Make an example of each line of a file, with references as its scorer expects them."""
    return [record.fitted(make(record)) for record in read_jsonl(path, limit)]


def named_after(path: Path, suite: str, tasks: Iterable[str]) -> str:
    """Return the task that a file is named after; ValueError if no task of the suite has the file's name."""
    with Record(str(path), {}).named():
        check_name(f"{suite} task", path.stem, tasks)
    return path.stem


def _json_lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:  # bytes, so that only \n ends a line, whatever separators of Unicode the texts hold
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line, f"{path}, line {number}")


def _parsed(line: bytes, where: str) -> Record:
    try:
        value = parse_json(line)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
        start = line[:40].decode("utf-8", "replace").strip()
        raise ValueError(f"{where}: expected a JSON object, got a damaged line ({error}): {start!r}...") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {shown(value)}")
    return Record(where, value)


def read_json_list(path: Path, limit: int | None = None) -> list[Record]:
    """Read a file that is a JSON list of objects."""
    check_file(path)
    try:
        entries = parse_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON list of objects, got a damaged file ({error})") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: expected a JSON list of at least one object, got {shown(entries)}")
    for number, entry in enumerate(entries[:limit], 1):
        if not isinstance(entry, dict):
            raise ValueError(f"{path}, entry {number}: expected a JSON object, got {shown(entry)}")
    return [Record(f"{path}, entry {number}", entry) for number, entry in enumerate(entries[:limit], 1)]
