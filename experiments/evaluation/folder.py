"""A result folder: config.yaml, metrics.json, meta.json, predictions/, examples.npz, tables and plots.

An evaluation that was interrupted continues in its folder.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.evaluation import examples
from experiments.evaluation.settings import joined
from experiments.records import record
from experiments.records.resumable import Results


class Folder:
    """The folder of one evaluation.

    A cell is finished when its row stands in metrics.json, which is written after its predictions; so an interruption at any
    moment costs at most one cell. Every row names the run (an entry of meta.json) that made it: commit, versions and device.
    Several processes may fill one folder, each with other methods or cells.

    Args:
        path: the folder; it is made.
        kind: what it holds, "eval" or "sweep".
        common: what all its cells have in common; JSON values.
        config: text of config.yaml, which is written with the first cell; settings that others joined are kept in it.
        meta: what meta.json says of this run beside commit, versions and device; JSON values.
        force: throw away what the folder holds, once this run has a cell.

    Raises:
        ValueError: the folder holds cells of other settings.
    """

    def __init__(
        self,
        path: pathlib.Path,
        kind: str,
        common: Mapping[str, Any],
        config: str,
        meta: Mapping[str, Any],
        force: bool = False,
    ) -> None:
        self.path = path
        self.results = Results(path / "metrics.json", kind, common, fresh=force)
        self._config, self._force = config, force
        header = record.make_record(kind, {}, [])
        self._run = {name: header[name] for name in ("date", "commit", "versions", "device")} | dict(meta)
        self._run |= {"cells": 0, "compile_seconds": 0.0, "seconds": 0.0}
        self._number: int | None = None  # among meta.json's runs, once this one has a cell

    @property
    def _meta(self) -> pathlib.Path:
        return self.path / "meta.json"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The finished cells."""
        return self.results.metrics

    def find(self, identity: Mapping[str, Any]) -> dict[str, Any] | None:
        """The finished cell of this identity, or None."""
        return self.results.find(identity)

    def add(self, row: dict[str, Any], identity: Mapping[str, Any], predictions: Sequence[Mapping[str, Any]]) -> None:
        """Writes a finished cell: its predictions, its row, what this run has done so far.

        Args:
            row: a metric, see `experiments.records.record`; with "seconds" and "compile_seconds".
            identity: some of its fields, which tell it from all other rows.
            predictions: one JSON object an example.
        """
        # Other knobs under the same name take the place of what was there.
        place = {name: value for name, value in identity.items() if name != "knobs"}
        text = json.dumps(place, sort_keys=True)
        title = re.sub(r"[^A-Za-z0-9_.=-]+", "-", f"{identity['method']}--{row['name']}--{row.get('length') or 'file'}")
        name = f"predictions/{title[:100]}--{hashlib.sha256(text.encode()).hexdigest()[:8]}.jsonl"
        lines = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in predictions)
        record.write_bytes(self.path / name, lines.encode())
        self._run["cells"] += 1
        for part in ("seconds", "compile_seconds"):
            self._run[part] = round(self._run[part] + row[part], 2)
        with self.results.lock:
            if self._number is None:
                self._begin(name)
            runs = json.loads(self._meta.read_text(encoding="utf-8"))["runs"] if self._meta.exists() else []
            if self._number is None:
                self._number = len(runs)
                runs.append(self._run)
            runs[self._number] = self._run
            record.write_bytes(self._meta, (json.dumps({"runs": runs}, indent=1) + "\n").encode())
            self.results.add({**row, "predictions": name, "run": self._number}, place)

    def _begin(self, first: str) -> None:
        """Before the first cell, whose predictions are ``first``: what was there gives way, or is joined."""
        file = self.path / "config.yaml"
        if self._force:
            for old in (self._meta, file, self.path / examples.FILE, *self.path.glob("predictions/*.jsonl")):
                if old != self.path / first:
                    old.unlink(missing_ok=True)
        config = joined(file.read_text(encoding="utf-8"), self._config) if file.exists() else self._config
        record.write_bytes(file, config.encode())

    def keep_examples(self) -> None:
        """Writes examples.npz, with which the folder can be compared where its predictions are left out."""
        cells = {row["predictions"]: lines for row, lines in read_examples(self.path, self.rows)}
        record.write_bytes(self.path / examples.FILE, examples.packed(cells))

    def write(self, name: str, data: str | bytes) -> pathlib.Path:
        """Writes a table or a plot into the folder; returns its path."""
        path = self.path / name
        record.write_bytes(path, data.encode() if isinstance(data, str) else data)
        return path


def read_rows(path: pathlib.Path) -> dict[str, Any]:
    """metrics.json of a folder, or of the file itself.

    Raises:
        ValueError: there is none, or it is no record.
    """
    file = path / "metrics.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is neither a folder with a metrics.json nor a JSON record")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        found["metrics"], found["settings"], found["experiment"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no record of an evaluation: {error!r}") from error
    return found


def read_runs(path: pathlib.Path) -> list[dict[str, Any]]:
    """meta.json of a folder: every run that gave it a cell, oldest first; none for a file or a folder without."""
    file = path / "meta.json"
    return json.loads(file.read_text(encoding="utf-8"))["runs"] if file.is_file() else []


def read_predictions(folder: pathlib.Path, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a row's examples were answered, in their order.

    Raises:
        ValueError: the file is not there.
    """
    path = folder / row["predictions"]
    if not path.is_file():
        raise ValueError(f"{folder} lacks {row['predictions']}, which its metrics.json names")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_examples(folder: pathlib.Path, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], list[dict]]]:
    """Each row with its examples as `examples.brief` gives them, from the predictions or, without them, from examples.npz.

    Raises:
        ValueError: neither file has a row's examples.
    """
    kept = examples.unpacked(folder / examples.FILE)
    made = []
    for row in rows:
        name = row["predictions"]
        if name in kept and not (folder / name).is_file():
            made.append((row, kept[name]))
        else:
            made.append((row, [examples.brief(line) for line in read_predictions(folder, row)]))
    return made
