"""Rare work of layers after a step: `LayerMethod.settle`, once for all layers or not at all."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.protocol.method import LayerMethod
from pallas_kernels.dispatch import run_shared
from pallas_kernels.numerics import run_if


def settle_due(methods: Sequence[LayerMethod], states: tuple[Any, ...]) -> tuple[Any, ...]:
    """Settle the states of all layers after a step (`LayerMethod.settle`), if any row of any layer is `LayerMethod.due`.

    All layers share one loop, which runs once or not at all. A condition in each layer would cost more: the branch that does
    nothing copies the layer's cache, and work that one CUDA graph cannot hold waits for the host in every layer.
    """
    chosen = [at for at, (method, state) in enumerate(zip(methods, states, strict=True)) if method.due(state) is not None]
    if not chosen:
        return states

    def any_due(some: tuple[Any, ...]) -> Array:
        layers = zip(chosen, some, strict=True)
        rows = [run_shared(type(methods[at]).due, methods[at], state) for at, state in layers]
        return functools.reduce(jnp.logical_or, [each.any() for each in rows])

    def change(states: tuple[Any, ...], methods: Sequence[LayerMethod]) -> tuple[Any, ...]:
        some: list[Any] = []
        for method, state, take in zip(methods, states, _reworked(methods, states), strict=True):
            if some:  # one layer after the other, so that only one layer's temporaries exist at a time
                state, some[-1] = lax.optimization_barrier((state, some[-1]))
            some.append(run_shared(type(method).settle, method, state, take()))
        return tuple(some)

    some = tuple(states[at] for at in chosen)
    some = run_if(change, any_due(some), some, tuple(methods[at] for at in chosen))
    new = list(states)
    for at, state in zip(chosen, some, strict=True):
        new[at] = state
    return tuple(new)


def _reworked(methods: Sequence[LayerMethod], states: Sequence[Any]) -> list[Callable[[], Any]]:
    """Run `LayerMethod.rework` for each layer; the results are functions to be called in the order of the layers.

    Layers of equal structure go through one loop, and each round of the loop reads another layer. Their results are read at
    an index that XLA does not know: otherwise it would compile kernels for each layer.
    """
    alike: dict[Any, list[int]] = {}
    for at, (method, state) in enumerate(zip(methods, states, strict=True)):
        shapes = jax.eval_shape(method.excerpt, state)
        kinds = tuple((x.shape, x.dtype) for x in jax.tree.leaves(shapes))
        if kinds:
            alike.setdefault((jax.tree.structure((method, shapes)), kinds), []).append(at)
    made: list[Callable[[], Any]] = [lambda: None] * len(methods)
    for layers in alike.values():
        excerpts = [functools.partial(run_shared, type(methods[at]).excerpt, methods[at], states[at]) for at in layers]
        results = _in_turn(methods[layers[0]].rework, excerpts)
        for at in layers:
            made[at] = functools.partial(next, results)
    return made


def _in_turn(rework: Callable[[Any], Any], excerpts: Sequence[Callable[[], Any]]) -> Iterator[Any]:
    """Yield ``rework`` of each of the ``excerpts``."""
    results = lax.map(lambda number: rework(lax.switch(number, excerpts)), jnp.arange(len(excerpts), dtype=jnp.int32))
    number = jnp.int32(0)
    for _ in excerpts:
        number = lax.optimization_barrier(number)
        yield jax.tree.map(lambda x, number=number: lax.dynamic_index_in_dim(x, number, keepdims=False), results)
        number = number + 1
