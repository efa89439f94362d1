"""Clocks that measure compilation apart from computation, because JAX compiles in the first call of every shape."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

_COMPILE = "/jax/core/compile/"  # events of tracing, of lowering and of XLA


class CompileClock:
    """A clock of the wall-clock seconds of compilation inside a ``with`` block, in the thread that entered it.

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
        self._thread = threading.get_ident()
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: Any) -> None:
        if not event.startswith(_COMPILE) or threading.get_ident() != self._thread:
            return
        # A span is reported when it ends, and spans of tracing are nested: remove the spans inside this span.
        now = time.monotonic()
        begun = now - duration_secs
        while self._spans and self._spans[-1][0] >= begun:
            inner = self._spans.pop()
            self.seconds -= inner[1] - inner[0]
        if self._spans:
            begun = max(begun, self._spans[-1][1])
        self._spans.append((begun, now))
        self.seconds += now - begun


class Timer:
    """A timer of the wall-clock seconds of a ``with`` block, with compilation counted apart.

    Attributes:
        run: seconds without compilation.
        compile: seconds of compilation.
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
