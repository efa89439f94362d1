"""A result folder, which later runs continue.

It holds config.yaml, metrics.json, predictions/, examples.npz, a table and figures.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.benchmarks import Encoded
from experiments.cli import naming
from experiments.evaluation import examples
from experiments.evaluation.answers import joined
from experiments.records import Results, make_record, write_bytes
from kvjax.protocol.typing import not_none
from models.files.directories import leaves_folder


class Folder:
    """The result folder of an evaluation.

    A cell is finished when its row is in metrics.json. The row is written after the cell's predictions, so an interruption
    costs at most one cell. Every row has the index of the run in the record's note "runs", with commit, versions and device.
    Several processes may fill a folder, each with other methods or cells.

    Args:
        path: the folder, which is created if need be.
        common: settings that all cells of the folder share; JSON values.
        config: text of config.yaml, which is written with the first cell.
        meta: more facts about this run for the note "runs", in addition to commit, versions and device; JSON values.
        force: throw away what the folder holds, as soon as this run has a cell.

    Raises:
        ValueError: the folder holds cells of other settings.
    """

    def __init__(
        self, path: pathlib.Path, common: Mapping[str, Any], config: str, meta: Mapping[str, Any], force: bool = False
    ) -> None:
        self.path = path
        self.results = Results(path / "metrics.json", "eval", common, fresh=force)
        self._config, self._force = config, force
        header = make_record("eval", {}, [])
        self._run = {name: header[name] for name in ("date", "commit", "versions", "device")} | dict(meta)
        self._run |= {"cells": 0, "compile_seconds": 0.0, "seconds": 0.0}
        self._number: int | None = None  # this run's index, as soon as it has a cell

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The finished cells."""
        return self.results.metrics

    def find(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the row of the finished cell with this identity, or None."""
        return self.results.find(identity)

    def add(self, row: dict[str, Any], identity: Mapping[str, Any], predictions: Sequence[Mapping[str, Any]]) -> None:
        """Write a finished cell: its predictions, its row, and the totals of this run.

        Args:
            row: a metric, see `experiments.records.make_record`; with "seconds" and "compile_seconds".
            identity: the fields that tell the row from all other rows.
            predictions: a JSON object for each example.
        """
        # A row with other knobs under the same name replaces the row that is there.
        key = {name: value for name, value in identity.items() if name != "knobs"}
        text = json.dumps(key, sort_keys=True)
        title = re.sub(r"[^A-Za-z0-9_.=-]+", "-", f"{identity['method']}--{row['name']}--{row.get('length') or 'file'}")
        name = f"predictions/{title[:100]}--{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
        if old := self.find(key):
            name = old["predictions"]
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in predictions)
        write_bytes(self.path / name, lines.encode())
        self._run["cells"] += 1
        for part in ("seconds", "compile_seconds"):
            self._run[part] = round(self._run[part] + row[part], 2)
        with self.results.lock:
            if self._number is None:
                self._begin(name)
            self.results.read()
            self.results.notes["runs"] = self._with_run(self.results.notes.get("runs"))
            self.results.put({**row, "predictions": name, "run": self._number}, key)

    def joined(
        self, encoded: Encoded, identity: Mapping[str, Any], row: Mapping[str, Any], lines: list[dict[str, Any]]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Join a row of further examples, and their predictions, with the row of this identity; see `answers.joined`."""
        old = not_none("the row", self.find(identity))
        ((_, kept),) = read_examples(self.path, [old])
        before = read_predictions(self.path, old) if (self.path / old["predictions"]).is_file() else []
        return joined(encoded, old, kept, row, lines), before + lines

    def _with_run(self, runs: list[Mapping[str, Any]] | None) -> list[Mapping[str, Any]]:
        if self._number is None:
            self._number = len(runs or ())
        return [*(runs or ())[: self._number], self._run, *(runs or ())[self._number + 1 :]]

    def _begin(self, first: str) -> None:
        """Prepare the folder for this run's first cell, whose predictions are ``first``; with ``force`` clear it."""
        if self._force:
            for old in (self.path / examples.FILE, *self.path.glob("predictions/*.jsonl")):
                if old != self.path / first:
                    old.unlink(missing_ok=True)
        write_bytes(self.path / "config.yaml", self._config.encode())

    def keep_examples(self) -> None:
        """Write examples.npz, which stands in for the predictions if somebody leaves them out of the folder."""
        cells = {row["predictions"]: lines for row, lines in read_examples(self.path, self.rows)}
        write_bytes(self.path / examples.FILE, examples.packed(cells))

    def write(self, name: str, data: str | bytes) -> pathlib.Path:
        """Write a table or a plot into the folder; return its path."""
        path = self.path / name
        write_bytes(path, data.encode() if isinstance(data, str) else data)
        return path


def read_predictions(folder: pathlib.Path, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the predictions of a row, in the order of its examples.

    Raises:
        ValueError: the file of predictions is missing, damaged, or outside of the folder.
    """
    path = folder / row["predictions"]
    if leaves_folder(row["predictions"]):
        raise ValueError(f"{folder}: predictions must be a file of the folder, got {row['predictions']!r} in metrics.json")
    if not path.is_file():
        raise ValueError(f"{folder} lacks {row['predictions']}, which its metrics.json names")
    with naming(path):
        return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def read_examples(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[dict]]]:
    """Read each row's examples as `examples.brief` gives them.

    The examples come from the predictions or, if the predictions are missing, from examples.npz.

    Raises:
        ValueError: the files lack a row or some of its examples, or one is damaged.
    """
    kept = examples.unpacked(folder / examples.FILE)

    def of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
        name = row["predictions"]
        if name in kept and not (folder / name).is_file():
            return kept[name]
        lines = [examples.brief(line) for line in read_predictions(folder, row)]
        expected = row.get("examples", 1)
        missing = max(expected - len(lines), 0)  # the row has got more samples since
        before = kept.get(name, [])[:missing]
        if len(before) < missing:
            raise ValueError(f"{folder} has {len(before + lines)} examples of {name}, its row says {expected}")
        return before + lines

    return [(row, of(row)) for row in rows]
