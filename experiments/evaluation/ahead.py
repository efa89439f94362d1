"""Compiles the programs of the next methods while this one runs.

Tracing holds Python's lock, so a single thread traces, in the order in which the programs will be needed. XLA's compiler does
not hold the lock, so several threads compile what was traced. The thread that asks finds the programs in JAX's own caches. It
runs first what is compiled first. A program that could not be compiled here is compiled there, where its error belongs.

A method's times stay usable: XLA never tries variants of a kernel while another program is on the GPU. On a CPU, where the
model needs all cores, nothing is compiled ahead; a method's own programs are compiled side by side.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

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
        self._changed = threading.Event()  # set whenever a program is traced or compiled

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
            self._traced[key].add_done_callback(self._note)

    def wait(self, key: Hashable) -> None:
        """Returns when the programs of ``key``, which were added, are compiled or could not be."""
        traced = self._traced[key]
        if traced.exception() is None:
            concurrent.futures.wait(traced.result())

    def first(self, wanted: Sequence[Collection[Hashable]]) -> int:
        """Waits until all programs of one of several sets of keys, which were added, are compiled or could not be.

        Returns:
            The place of that set; of several, the first. An empty set is ready at once.
        """
        while True:
            self._changed.clear()
            for place, keys in enumerate(wanted):
                if all(self._is_ready(key) for key in keys):
                    return place
            self._changed.wait()

    def _is_ready(self, key: Hashable) -> bool:
        traced = self._traced[key]
        return traced.done() and (traced.exception() is not None or all(one.done() for one in traced.result()))

    def _lower(self, programs: Callable[[], Iterable[Lowered]]) -> list[concurrent.futures.Future]:
        compiling = [self._compilers.submit(lowered.compile) for lowered in programs()]
        for one in compiling:
            one.add_done_callback(self._note)
        return compiling

    def _note(self, _: concurrent.futures.Future) -> None:
        self._changed.set()


class Waiting[T]:
    """What is still to run, in order; but what is compiled goes before what is not.

    Args:
        items: what is to run.
        keys: of an item, those of its programs that were added to ``ahead``.
        ahead: compiles them.
    """

    def __init__(self, items: Iterable[T], keys: Callable[[T], Collection[Hashable]], ahead: CompileAhead) -> None:
        self._items, self._keys, self._ahead = list(items), keys, ahead

    def __bool__(self) -> bool:
        return bool(self._items)

    def take(self) -> T:
        """The first item that is compiled, when there is one; an item without keys counts as compiled."""
        return self._items.pop(self._ahead.first([self._keys(item) for item in self._items]))

    def put_back(self, items: Sequence[T]) -> None:
        """Puts items before all others."""
        self._items[:0] = items
