"""Telling compilation from computation: JAX compiles inside the first call of every shape."""

from __future__ import annotations

import time
from typing import Any

import jax

_COMPILE = "/jax/core/compile/"  # tracing, lowering and XLA's own work


class CompileClock:
    """Counts the wall-clock seconds spent compiling inside a ``with`` block.

    >>> with CompileClock() as clock:
    ...     begun, before = time.monotonic(), clock.seconds
    ...     jax.block_until_ready(step(x))
    ...     ran = time.monotonic() - begun - (clock.seconds - before)

    Attributes:
        seconds: compile time so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> CompileClock:
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration: float, **details: Any) -> None:
        if not event.startswith(_COMPILE):
            return
        # Spans are reported as they end, and tracing nests: swallow what lies within.
        now = time.monotonic()
        begun = now - duration
        while self._spans and self._spans[-1][0] >= begun:
            inner = self._spans.pop()
            self.seconds -= inner[1] - inner[0]
        if self._spans:
            begun = max(begun, self._spans[-1][1])
        self._spans.append((begun, now))
        self.seconds += now - begun


class Timer:
    """Wall-clock seconds of a ``with`` block, compile time apart.

    Attributes:
        run: seconds that were not compilation.
        compile: seconds that were.
    """

    def __init__(self, clock: CompileClock) -> None:
        self.run = self.compile = 0.0
        self._clock = clock

    def __enter__(self) -> Timer:
        self._begun, self._before = time.monotonic(), self._clock.seconds
        return self

    def __exit__(self, *error: object) -> None:
        self.compile = self._clock.seconds - self._before
        self.run = time.monotonic() - self._begun - self.compile
