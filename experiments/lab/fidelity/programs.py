"""Compiles the programs of `follow_text` ahead of their use; budgets and streams share them.

A small run spends nearly all its time compiling. A program depends on shapes and on the static fields of a method. So the
methods of one name get room for the largest of their budgets (`shared_room`), and one program serves all of them. Threads
compile further programs while the first programs run: XLA works outside of Python's lock.
"""

from __future__ import annotations

import concurrent.futures
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.lab.fidelity.distance import follow_text
from experiments.lab.fidelity.texts import Texts
from kvjax.accounting.stats import Stats
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model

_MOST_THREADS = 8


def shared_room(methods: Sequence[Method], length: int) -> Any:
    """Choose the `capacity` that methods of a kind can share: their largest capacity.

    A capacity of `length` or more says that a method attends to everything, so it is not shared with smaller budgets.

    Args:
        methods: methods of the same class, whose static fields are equal except `capacity`.
        length: tokens of context and text.

    Returns:
        A number of tokens, a share, or three shares, in the form of the methods' field; None if there is nothing to share.
    """
    given = [vars(method).get("capacity") for method in methods]
    shares = [room for room in given if isinstance(room, tuple)]
    if shares:
        return tuple(max(parts) for parts in zip(*shares, strict=True))
    return max((room for room in given if room is not None and room < length), default=None)


class Programs:
    """The programs of a model at some shapes.

    Args:
        params: model parameters.
        model: the model's description.
    """

    def __init__(self, params: Any, model: Model) -> None:
        self._params, self._model = params, model
        self._pool = concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2)))
        self._made: dict[Any, concurrent.futures.Future] = {}
        self._tracing = threading.Lock()  # a kernel's language may have a compiler in Python that takes one thread

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def ahead(self, method: Method, texts: Texts, kv_dtype: str | None = None) -> None:
        """Begin to compile the program of a method for batches of this shape, unless that was begun before."""
        key = _key(method, texts, kv_dtype)
        if key not in self._made:
            self._made[key] = self._pool.submit(self._compile, self._arguments(method, texts), kv_dtype)

    def wait(self, method: Method, texts: Texts, kv_dtype: str | None = None) -> float:
        """Wait for a program, and return its seconds of compiling; return 0 if they were returned before."""
        self.ahead(method, texts, kv_dtype)
        program = self._made[_key(method, texts, kv_dtype)].result()
        seconds, program.untold = program.untold, 0.0
        return seconds

    def run(self, method: Method, texts: Texts, kv_dtype: str | None = None) -> tuple[Array, Stats]:
        """Run `follow_text` for a method and a batch, and return its result."""
        self.ahead(method, texts, kv_dtype)
        return self._made[_key(method, texts, kv_dtype)].result().call(*self._arguments(method, texts))

    def _arguments(self, method: Method, texts: Texts) -> tuple:
        arrays = (jnp.asarray(x) for x in (texts.prompts, texts.lengths, texts.forced, texts.counts))
        return (self._params, method, *arrays)

    def _compile(self, arguments: tuple, kv_dtype: str | None) -> Program:
        with self._tracing:
            begun = time.monotonic()
            lowered = follow_text.lower(*arguments, model=self._model, kv_dtype=kv_dtype)
        return Program(lowered.compile(), time.monotonic() - begun)


class Program:
    """A compiled program.

    Attributes:
        call: takes the arguments of `follow_text` except the model.
        untold: seconds of compiling that no row has counted yet.
    """

    def __init__(self, call: Callable[..., tuple[Array, Stats]], untold: float) -> None:
        self.call, self.untold = call, untold


def _key(method: Method, texts: Texts, kv_dtype: str | None) -> tuple:
    return jax.tree.structure(method), texts.prompts.shape, texts.forced.shape, kv_dtype
