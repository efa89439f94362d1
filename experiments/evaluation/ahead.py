"""Compiles the programs of the next methods while this one runs.

Tracing holds Python's lock, so a single thread traces, in the order in which the programs will be needed. XLA's compiler does
not hold the lock, so several threads compile what was traced. The thread that asks finds the programs in JAX's own caches. A
program that could not be compiled here is compiled there, where its error belongs.

A method's times stay usable: XLA never tries variants of a kernel while another program is on the GPU. On a CPU, where the
model needs all cores, nothing is compiled ahead; a method's own programs are compiled side by side.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Hashable, Iterable

import jax
from jax.stages import Lowered

_MOST = 8  # threads; each holds the memory of a compilation


class CompileAhead:
    """A queue of programs; use it in a ``with`` block. At the block's end what has not begun is dropped.

    Args:
        threads: threads that compile; None takes half of the cores, at most eight.

    Attributes:
        spare: whether programs may be compiled while a model runs.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.spare = jax.default_backend() != "cpu"
        self._threads = threads or min(_MOST, (os.cpu_count() or 1) // 2 + 1)
        self._traced: dict[Hashable, concurrent.futures.Future] = {}

    def __enter__(self) -> CompileAhead:
        self._tracer = concurrent.futures.ThreadPoolExecutor(1, "trace")
        self._compilers = concurrent.futures.ThreadPoolExecutor(self._threads, "compile")
        return self

    def __exit__(self, *error: object) -> None:
        for pool in (self._tracer, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def add(self, key: Hashable, programs: Callable[[], Iterable[Lowered]]) -> None:
        """Queues the programs that ``programs`` traces and lowers, unless those of ``key`` are queued already."""
        if key not in self._traced:
            self._traced[key] = self._tracer.submit(self._lower, programs)

    def wait(self, key: Hashable) -> None:
        """Returns when the programs of ``key``, which were added, are compiled or could not be."""
        traced = self._traced[key]
        if traced.exception() is None:
            concurrent.futures.wait(traced.result())

    def _lower(self, programs: Callable[[], Iterable[Lowered]]) -> list[concurrent.futures.Future]:
        return [self._compilers.submit(lowered.compile) for lowered in programs()]
