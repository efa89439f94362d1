"""The processes that measure, each with its own environment: one is started, asked, and ended when it does not answer."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any, Self

from experiments.collectives.measure import Cell

_STARTING = 180  # seconds that a process may take to start


class Died(Exception):
    """A process ended or was ended before it answered; the text says why."""


class Worker:
    """A process that measures cells (`experiments.collectives.child`).

    Args:
        mesh: the mesh as text, or None for all devices.
        environment: variables beside those of this process.
        patience: seconds that a cell may take.

    Attributes:
        device: the platform, kind and number of its devices.
        mesh: the mesh as text, with all axes.

    Raises:
        Died: it did not start.
        ValueError: the mesh does not fit its devices.
    """

    def __init__(self, mesh: str | None, environment: Mapping[str, str], patience: int) -> None:
        self._patience, self._said = patience, tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.collectives.child", mesh or ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **environment},
        )
        try:
            hello = self._answer(_STARTING)
            if "refused" in hello:
                raise ValueError(hello["refused"])
        except BaseException:
            self.end()
            raise
        self.device, self.mesh = hello["device"], hello["mesh"]

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The figures of a cell, or its error.

        Raises:
            Died: there will be no answer, and the process is ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(cell)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: there is no answer, which says why
        return self._answer(self._patience)

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except BrokenPipeError:
                pass
        self._said.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _answer(self, seconds: int) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            if not ready.select(seconds):
                self._process.kill()
                raise Died(f"no answer in {seconds} seconds")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            said = [text for text in self._said.read().decode(errors="replace").splitlines() if text.strip()]
            raise Died(f"the process ended with code {code}: {' '.join(said[-3:])[-1500:]}")
        return json.loads(line)
