"""Results that survive an interruption: the record is written after every cell, and a later run continues it."""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from filelock import FileLock

from experiments.records.folding import unfold
from experiments.records.record import device_kinds, make_record, write_record
from kvjax.attention.patterns import Pattern
from kvjax.plugins import outside, path_of
from kvjax.protocol.describe import describe
from kvjax.protocol.method import Method

_LONGEST = 240  # bytes


def knobs_of(method: Method) -> dict[str, Any]:
    """Return all hyper-parameters of a method as JSON values; arrays and methods become a short text that tells them apart.

    A method outside of kvjax also has its path, ``package.module:Class``, under "class". Where it, or a method inside of a
    wrapper, is from outside, "source" is a digest of the files of its class and of the classes that it extends: cells of
    an edited class are others.
    """
    path, foreign = path_of(type(method)), outside().values()
    knobs = {field.name: _plain(vars(method)[field.name]) for field in dataclasses.fields(method)}
    source = " ".join(dict.fromkeys(_source(cls) for cls in _classes(method) if cls in foreign))
    about = {} if path is None else {"class": path}
    return {**about, **({"source": source} if source else {}), **knobs}


def _classes(value: Any) -> Iterator[type[Method]]:
    """Yield the class of a method, and those of the methods inside of it."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, Method):
        yield type(value)
        value = tuple(vars(value).values())
    for part in value if isinstance(value, (tuple, list)) else ():
        yield from _classes(part)


@functools.cache
def _source(cls: type[Method]) -> str:
    """Digest the files of a class and of its bases outside of kvjax; of a class without a file, the code of its functions."""
    modules = dict.fromkeys(base.__module__ for base in cls.__mro__)
    modules = [name for name in modules if name.partition(".")[0] not in ("kvjax", *sys.stdlib_module_names)]
    files = [getattr(sys.modules.get(module), "__file__", None) for module in modules]
    parts = [pathlib.Path(file).read_bytes() for file in files if file]
    if getattr(sys.modules[cls.__module__], "__file__", None) is None:
        codes = [getattr(hook, "__code__", None) for hook in vars(cls).values()]
        parts += [repr((x.co_code, x.co_names)).encode() for x in codes if x]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:12]


def _lock_of(path: pathlib.Path) -> pathlib.Path:
    """Name the lock of a file; a long name is shortened to a digest, because a system takes 255 bytes."""
    encoded = os.fsencode(path.name)
    short = path.name if len(encoded) < _LONGEST else hashlib.sha256(encoded).hexdigest()
    return path.with_name(f".{short}.lock")


def _version(path: pathlib.Path) -> tuple[int, ...]:
    """Tell a file from those that take its place: each write makes another one."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Method, Pattern)):
        return describe(value)
    array = np.asarray(value)
    return array.item() if array.ndim == 0 else f"{array.dtype.name}{list(array.shape)}, sum {array.sum()}"


class Results:
    """The cells of an experiment in a file to which several processes may add; ``fresh`` begins anew with the first write.

    A file that is no record, or that holds another experiment or cells of other settings, is refused. ``packages`` are
    further ones whose versions are kept.

    Attributes:
        metrics: the cells, as of the last read or write.
        notes: JSON values beside the cells, by name.
        devices: the kinds of devices that made the cells, oldest first; the record also holds the newest run's device.
        lock: held while the file is read, changed and written.
    """

    def __init__(
        self,
        path: pathlib.Path,
        experiment: str,
        settings: Mapping[str, Any],
        *,
        fresh: bool = False,
        packages: tuple[str, ...] = (),
    ) -> None:
        self.path, self._fresh = path, fresh
        self._packages = packages
        self._experiment, self.settings = experiment, dict(settings)
        self.metrics: list[dict[str, Any]] = []
        self.notes: dict[str, Any] = {}
        self.devices: list[str] = []
        self._as_of: tuple[int, ...] = ()  # the file that `metrics` and `notes` are from
        self.lock = FileLock(_lock_of(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.read()

    def read(self) -> None:
        """Take over the cells and notes that the file holds now."""
        if self._fresh or not self.path.exists() or (as_of := _version(self.path)) == self._as_of:
            return
        try:
            record = json.loads(self.path.read_text(encoding="utf-8"))
            kinds = {"experiment": str, "settings": dict, "metrics": list, "notes": dict}
            if wrong := [name for name, kind in kinds.items() if not isinstance(record[name], kind)]:
                raise TypeError(f"{wrong[0]} is {record[wrong[0]]!r:.40}")
            if wrong := [row for row in record["metrics"] if not isinstance(row, dict)]:
                raise TypeError(f"one of the metrics is {wrong[0]!r:.40}")
            record = unfold(record)
        except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, RecursionError) as error:
            raise ValueError(f"{self.path} is no record of an experiment: {error!r}") from error
        if record["experiment"] != self._experiment:
            raise ValueError(f"{self.path} holds the experiment {record['experiment']!r}, expected {self._experiment!r}")
        for name, value in self.settings.items():
            # A setting that the record lacks was added to the experiment later.
            if (stored := record["settings"].get(name, value)) != value:
                raise ValueError(f"{self.path} holds cells with {name}={stored!r}, got {value!r}: choose another --out")
        self.metrics, self.notes, self.devices = record["metrics"], record["notes"], device_kinds(record)
        self._as_of = as_of

    def find(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Find the finished cell whose fields include all of ``identity``, or None."""
        return next((m for m in self.metrics if all(m.get(name) == value for name, value in identity.items())), None)

    def add(self, metric: dict[str, Any], identity: Mapping[str, Any]) -> None:
        """Add a finished cell, which replaces a cell whose fields include all of ``identity``, and write the file."""
        with self.lock:
            self.read()
            self.put(metric, identity)

    def put(self, metric: dict[str, Any], identity: Mapping[str, Any]) -> None:
        """Run `add` after a `read` under the same `lock`."""
        old = self.find(identity)
        if old is not None:
            self.metrics[self.metrics.index(old)] = metric
        else:
            self.metrics.append(metric)
        self.write()

    def note(self, name: str, value: Any) -> None:
        """Keep a JSON value beside the cells and write the file."""
        self.change(name, lambda old: value)

    def change(self, name: str, update: Callable[[Any], Any]) -> None:
        """Replace a note by what ``update`` makes of the note that the file holds now, or of None, and write the file."""
        with self.lock:
            self.read()
            self.notes[name] = update(self.notes.get(name))
            self.write()

    def write(self) -> None:
        """Write the record."""
        record = make_record(self._experiment, self.settings, self.metrics, packages=self._packages)
        self.devices = list(dict.fromkeys([*self.devices, record["device"]["kind"]]))
        write_record(self.path, {**record, "notes": self.notes, "devices": self.devices})
        self._fresh, self._as_of = False, _version(self.path)
