"""Compiles the programs of the next methods while the present method runs.

Tracing holds Python's lock, so a single thread traces, in the order in which the programs will be needed. XLA's compiler does
not hold the lock, so several threads compile the traced programs. The thread that runs the methods finds the programs in
JAX's own caches. If a program fails to compile here, the running thread compiles it again and raises the error.

A method's times stay usable: XLA never tries variants of a kernel while another program is on the GPU. On a CPU, where the
model needs all cores, nothing is compiled ahead; a method's own programs are compiled in parallel.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Hashable, Iterable

import jax
from jax.stages import Lowered

_MOST = 8  # threads; each holds the memory of a compilation


class CompileAhead:
    """A queue of programs to compile; use it in a ``with`` block. The block's end drops programs that have not begun.

    Args:
        threads: number of threads that compile; None takes half of the cores plus one, at most eight.

    Attributes:
        spare: whether programs may be compiled while a model runs.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.spare = jax.default_backend() != "cpu"
        self._threads = threads or min(_MOST, (os.cpu_count() or 1) // 2 + 1)
        self._traced: dict[Hashable, concurrent.futures.Future] = {}
        self._compiling: dict[Hashable, list[concurrent.futures.Future]] = {}  # the programs that are traced so far
        self._changed = threading.Condition()  # is notified whenever a key is traced or a program is compiled

    def __enter__(self) -> CompileAhead:
        self._tracer = concurrent.futures.ThreadPoolExecutor(1, "trace")
        self._compilers = concurrent.futures.ThreadPoolExecutor(self._threads, "compile")
        return self

    def __exit__(self, *error: object) -> None:
        for pool in (self._tracer, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def add(self, key: Hashable, programs: Callable[[], Iterable[Lowered]]) -> None:
        """Add the programs that ``programs`` traces and lowers to the queue, unless ``key`` is queued already."""
        if key not in self._traced:
            self._compiling[key] = []
            self._traced[key] = self._tracer.submit(self._lower, self._compiling[key], programs)
            self._traced[key].add_done_callback(self._note)

    def wait(self, key: Hashable, programs: int | None = None) -> None:
        """Wait until the first ``programs`` of an added ``key`` have compiled or failed; None means all programs."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_ready(key, programs))

    def describe(self) -> str:
        """Tell how many programs are compiled and how many are not, of the programs that are traced so far."""
        traced = [one for programs in list(self._compiling.values()) for one in list(programs)]
        ready = sum(one.done() for one in traced)
        more = " and more to trace" if any(not one.done() for one in list(self._traced.values())) else ""
        return f"{ready} of {len(traced)} programs are ready{more}" if traced or more else ""

    def _is_ready(self, key: Hashable, programs: int | None) -> bool:
        traced = self._traced[key].done()  # asked first: the list grows until then
        compiling = self._compiling[key][:programs]
        return (traced or len(compiling) == programs) and all(one.done() for one in compiling)

    def _lower(self, compiling: list[concurrent.futures.Future], programs: Callable[[], Iterable[Lowered]]) -> None:
        for lowered in programs():
            compiling.append(self._compilers.submit(lowered.compile))
            compiling[-1].add_done_callback(self._note)

    def _note(self, _: concurrent.futures.Future) -> None:
        with self._changed:
            self._changed.notify_all()
