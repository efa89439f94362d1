"""Compiles the programs of the next methods while the present method runs.

Tracing holds Python's lock, so a single thread traces, in the order in which the programs will be needed. XLA's compiler does
not hold the lock, so several threads compile the traced programs. The thread that runs the methods finds the programs in
JAX's own caches. If a program fails to compile here, the running thread compiles it again and raises the error. None of these
threads runs a program: XLA records CUDA graphs while it runs one, and what another thread does on the device then ends both
(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, an H200, JAX 0.11.2).

A method's times stay usable: XLA never tries variants of a kernel while another program is on the GPU. On a CPU, where the
model needs all cores, nothing is compiled ahead; a method's own programs are compiled in parallel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.stages import Lowered

_MOST = 8  # threads; each holds the memory of a compilation
_TURN = 1e-4  # seconds of Python's lock for the thread that traces, if another waits: it waits after each call of a program


class CompileAhead:
    """A queue of programs to compile; use it in a ``with`` block. The block's end drops programs that have not begun.

    Args:
        threads: number of threads that compile; None takes half of the cores plus one, at most eight.

    Attributes:
        spare: whether programs may be compiled while a model runs.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.spare = jax.default_backend() != "cpu"
        self._tracer = ThreadPoolExecutor(1, "trace")
        self._compilers = ThreadPoolExecutor(threads or min(_MOST, (os.cpu_count() or 1) // 2 + 1), "compile")
        self._traced: dict[Hashable, Future[list[Future]]] = {}
        self._turn = sys.getswitchinterval()

    def __enter__(self) -> CompileAhead:
        sys.setswitchinterval(_TURN)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setswitchinterval(self._turn)
        for pool in (self._tracer, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)

    def add(self, key: Hashable, programs: Callable[[], Iterable[Lowered]]) -> None:
        """Add the programs that ``programs`` traces and lowers to the queue, unless ``key`` is queued already."""
        if key not in self._traced:

            def trace(again: bool = True) -> list[Future]:
                try:
                    return [self._compilers.submit(lowered.compile) for lowered in programs()]
                except Exception:  # once more: kernels are lowered by libraries that another thread may use at the same time
                    if not again:
                        raise
                    return trace(False)

            self._traced[key] = self._tracer.submit(trace)

    def done(self, key: Hashable) -> bool:
        """Tell whether the programs of an added ``key`` have compiled or failed."""
        traced = self._traced[key]
        return traced.done() and (traced.exception() is not None or all(one.done() for one in traced.result()))

    def wait(self, key: Hashable) -> BaseException | None:
        """Wait until the programs of an added ``key`` have compiled or failed; return the first error."""
        if error := self._traced[key].exception():
            return error
        return next(filter(None, [one.exception() for one in self._traced[key].result()]), None)
