"""The run: every cell that the record lacks, in processes that are started again when they are lost."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any, Self

from experiments.collectives.measure import Cell, elements
from experiments.collectives.report import line
from experiments.collectives.worker import Died, Worker
from experiments.records import Results
from experiments.speed import SUM_VARIANTS


class Job:
    """The measurements of a run, in one process after the other.

    Args:
        mesh: the mesh as text, or None for all devices.
        patience: seconds that a cell may take.

    Attributes:
        device: the platform, kind and number of the devices.
        mesh: the mesh as text, with all axes.
        name: the time at which the run began; the rows name it.
        failed: rows that ended with an error.
        wrong: rows whose result is not the sum.

    Raises:
        Died: a process without special settings does not start.
        ValueError: the mesh does not fit the devices.
    """

    def __init__(self, mesh: str | None, patience: int) -> None:
        self._asked, self._patience = mesh, patience
        self._worker: Worker | None = None
        self._environment: Mapping[str, str] = {}
        started = self._started({})
        self.device, self.mesh = started.device, started.mesh
        self.name = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self.failed = self.wrong = 0

    def variant(self, name: str, cells: list[Cell], results: Results) -> None:
        """Measure the cells of a variant that the record lacks; those that follow a lost process are left out."""
        for cell in cells:
            identity = {"name": "sum", "variant": name, "mesh": self.mesh, "dtype": cell.dtype, "bytes": cell.size}
            identity |= {"form": cell.form, "chain": cell.chain, **_settings(name)}
            known = results.find(identity)
            if known is not None and known["passed"]:
                print(f"{line(known)}, from the record", flush=True)
                continue
            lost = None
            try:
                row = self._started(SUM_VARIANTS[name].environment).measure(cell)
            except Died as problem:
                self.end()
                lost = str(problem)
                row = {"value": None, "unit": "s", "passed": False, "error": lost}
            made = {**identity, "elements": elements(cell.size, cell.dtype), **row, "run": self.name}
            self.failed += made["error"] is not None
            self.wrong += made["error"] is None and not made["passed"]
            results.add(made, identity)
            print(line(made), flush=True)
            if lost is not None:
                print(f"{name:21s} is not tried again in this run", flush=True)
                return

    def end(self) -> None:
        """End the process that measures."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _started(self, environment: Mapping[str, str]) -> Worker:
        """A process with these variables: the one that runs, or a new one after its end."""
        if self._worker is None or self._environment != environment:
            self.end()
            self._worker, self._environment = Worker(self._asked, environment, self._patience), environment
        return self._worker


def _settings(name: str) -> dict[str, Any]:
    """What a variant is; a row of the record of the same name and other settings does not count."""
    variant = SUM_VARIANTS[name]
    return {"sum": variant.sum, "options": dict(variant.options), "environment": dict(variant.environment)}
