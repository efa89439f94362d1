"""Records of users' files, and errors that name the file, the line, what was found and what was expected."""

import collections
import contextlib
import csv
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.tasks import check_name, check_unicode, reference_text


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
        """Return a field's value; ValueError if the field is missing or of another type.

        Args:
            name: the field.
            kinds: the types that are allowed.
            expected: the allowed types in words, for the message.
        """
        if name not in self.values:
            raise self.error(f"expected a field {name!r} ({expected}), got the fields {sorted(map(str, self.values))}")
        value = self.values[name]
        if not isinstance(value, kinds) or isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise self.error(f"expected {expected} in the field {name!r}, got {shown(value)}")
        return value

    def text(self, name: str) -> str:
        """Return the text in a field; ValueError if the field holds no text."""
        value = self.get(name, str, "a text")
        with self.named(name):
            check_unicode(value)
        return value

    def reference(self, name: str) -> str:
        """Return the text in a field; ValueError if the field holds no text, or a blank one."""
        text = self.text(name)
        with self.named(name):
            return reference_text(text)

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


def shown(value: Any) -> str:
    """Show a value in a message: its type, and at most 60 characters."""
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def check_file(path: Path) -> None:
    """Refuse a path that is not a file, with a ValueError."""
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, got {'a folder' if path.is_dir() else 'nothing at this path'}")


def named_after(path: Path, suite: str, tasks: Iterable[str], name: str = "") -> str:
    """Return the task that a file is named after, or ``name`` if one is given; ValueError if it is none of the suite's."""
    name = name or path.stem
    with Record(str(path), {}).named():
        check_name(f"{suite} task", name, tasks)
    return name


def parse_json(data: bytes, where: str, expected: str) -> Any:
    """Parse JSON in UTF-8, with or without a byte-order mark; ValueError if an object has a key twice, too."""
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, or nested too deeply
        start = data[:40].decode("utf-8", "replace").strip()
        raise ValueError(f"{where}: expected {expected}, got what is damaged ({error}): {start!r}...") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):  # Python would take the last value
        twice = [name for name, times in collections.Counter(name for name, _ in pairs).items() if times > 1]
        raise ValueError(f"expected keys once, got {twice[0]!r:.60} twice")
    return mapping


def _jsonl(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:  # bytes, so that only \n ends a line, whatever separators of Unicode the texts hold
        for number, line in enumerate(file, 1):
            if line.strip():
                where = f"{path}, line {number}"
                yield object_of(where, parse_json(line, where, "a JSON object"))


def object_of(where: str, value: Any) -> Record:
    """Make a record of a JSON object; ValueError for any other value."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {shown(value)}")
    return Record(where, value)


def _json(path: Path) -> Iterator[Record]:
    """Read a list of rows, or the default form of pandas: columns that map row numbers to values."""
    expected = "a JSON list of rows, or columns that map row numbers to values"
    value = parse_json(path.read_bytes(), str(path), expected)
    if isinstance(value, list):
        for number, entry in enumerate(value, 1):
            yield object_of(f"{path}, entry {number}", entry)
        return
    try:
        keys = dict.fromkeys(key for column in value.values() for key in column.keys())
        rows = {key: {name: column[key] for name, column in value.items()} for key in keys}
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: expected {expected}, got {shown(value)}") from error
    yield from (Record(f"{path}, row {key}", row) for key, row in rows.items())


def _csv(path: Path) -> Iterator[Record]:
    before = csv.field_size_limit(sys.maxsize)  # contexts can be longer than 131,072 characters
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)  # a quote that is not closed would hide the rows after it
            try:
                twice = [name for name, times in collections.Counter(rows.fieldnames or ()).items() if times > 1]
                if twice:
                    raise ValueError(f"{path}, line 1: expected columns of different names, got {twice[0]!r} twice")
                yield from (_csv_row(f"{path}, line {rows.line_num}", row) for row in rows)
            except (csv.Error, UnicodeDecodeError) as error:
                line = f"{path}, line {rows.reader.line_num}"
                raise ValueError(f"{line}: expected a row of a csv in UTF-8, got {error}") from error
    finally:
        csv.field_size_limit(before)


def _csv_row(where: str, row: dict[str | None, Any]) -> Record:
    """Refuse a row with more or fewer cells than the header, as a comma outside of quotes makes it."""
    if None in row or None in row.values():
        missing = sum(value is None for value in row.values())
        got = f"{missing} fewer" if missing else f"{len(row[None])} more"
        raise ValueError(f"{where}: expected a cell for each column, got {got}; quote cells that contain commas")
    return Record(where, row)


def _parquet(path: Path) -> Iterator[Record]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: reading parquet needs the package 'pyarrow', which is not installed and comes with no extra; "
            "install it (pip install pyarrow), or save the table as csv or jsonl"
        ) from error
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:  # damage inside of a page is an OSError
        raise ValueError(f"{path}: expected a parquet file, got {error}") from error
    yield from (Record(f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


ROWS: dict[str, Callable[[Path], Iterator[Record]]] = {".csv": _csv, ".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}


def read_records(path: Path, limit: int | None = None, suffixes: Iterable[str] = ()) -> list[Record]:
    """Read the first records of a file; records behind the limit are not looked at.

    Args:
        path: a JSON object in each line, or another form of `ROWS` by its suffix.
        limit: most records; None reads all.
        suffixes: the suffixes that are told apart; a file is read as jsonl whatever its suffix if there are none.

    Raises:
        ValueError: there is no such file, it has another suffix, no record, or a damaged one.
        ModuleNotFoundError: the file is parquet, and pyarrow is not installed.
    """
    check_file(path)
    if suffixes and path.suffix not in suffixes:
        raise ValueError(f"{path}: expected one of the suffixes {', '.join(suffixes)}, got {path.suffix!r}")
    with contextlib.closing(ROWS[path.suffix if suffixes else ".jsonl"](path)) as rows:
        records = list(itertools.islice(rows, limit))
    if not records:
        raise ValueError(f"{path}: expected at least one record, got none")
    return records
