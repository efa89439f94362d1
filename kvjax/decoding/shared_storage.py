"""Storage that several methods have in common: they prefill together, and it exists once.

Until its prompt is finished, a method with `LayerMethod.common_prompt` stores the keys and values of every prompt token in
``state.cache``, whatever its knobs. So methods whose storage has equal shapes store equal values. In the loops of a prefill
one method holds the storage, and the states of all other methods have None in its place (`Common.strip`). A method that keeps
every token finishes with the same arrays, so several such methods have the same arrays after prefill, too (`Once`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import Array, lax

from kvjax.cache import Cache, LayerSpec
from kvjax.protocol.method import LayerMethod, Method
from kvjax.protocol.typing import pytree, static
from pallas_kernels.dispatch import run_shared


@dataclasses.dataclass(frozen=True)
class Common:
    """The method that holds the storage of each state.

    Attributes:
        holders: holders[layer][method] is the index of a method: the state's own method, or an earlier one.
    """

    holders: tuple[tuple[int, ...], ...]

    def strip(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the storage that another state holds out of states [layer][method]."""
        return tuple(self.strip_layer(layer, own) for layer, own in enumerate(states))

    def strip_layer(self, layer: int, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run `strip` for the states [method] of one layer."""
        held = enumerate(zip(states, self.holders[layer], strict=True))
        return tuple(one if holder == at else dataclasses.replace(one, cache=None) for at, (one, holder) in held)

    def restore(self, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Undo `strip`."""
        return tuple(self.restore_layer(layer, own) for layer, own in enumerate(states))

    def restore_layer(self, layer: int, states: tuple[Any, ...]) -> tuple[Any, ...]:
        """Undo `strip_layer`."""
        held = enumerate(zip(states, self.holders[layer], strict=True))
        return tuple(
            one if holder == at else dataclasses.replace(one, cache=states[holder].cache) for at, (one, holder) in held
        )

    def after(self, before: tuple[Any, ...], finished: tuple[Any, ...]) -> Common:
        """Find the holders of finished states [layer][method], which were made from the states ``before``."""
        made = []
        for layer, own in enumerate(self.holders):
            first: dict[Hashable, int] = {}
            held = []
            for at, holder in enumerate(own):
                kept = own.count(holder) > 1 and keeps_storage(before[layer][at], finished[layer][at])
                held.append(first.setdefault(holder if kept else ("own", at), at))
            made.append(tuple(held))
        return Common(tuple(made))


def common_storage(
    each: Sequence[Sequence[LayerMethod]], specs: Sequence[Sequence[LayerSpec]], alone: Sequence[bool]
) -> Common:
    """Find the storage that methods have in common during prefill."""
    known: dict[Hashable, Hashable] = {}

    def key(method: LayerMethod, spec: LayerSpec) -> Hashable:
        kind = jax.tree.structure(method), spec
        if kind not in known:
            known[kind] = storage_key(method, spec, jax.eval_shape(lambda: method.init(spec)))
        return known[kind]

    holders = []
    for layer in range(len(each[0])):
        first: dict[Hashable, int] = {}
        keys = [None if alone[at] else key(own[layer], specs[at][layer]) for at, own in enumerate(each)]
        holders.append(tuple(first.setdefault(("own", at) if one is None else one, at) for at, one in enumerate(keys)))
    return Common(tuple(holders))


def stored_alone(method: Method, padded: int) -> bool:
    """Tell whether a method stores a prompt of ``padded`` tokens for itself: it rereads it, and may change what it keeps."""
    return method.reread_tokens(padded) > 0 and not method.evicts


def storage_key(method: LayerMethod, spec: LayerSpec, state: Any) -> Hashable:
    """Return what is equal for methods that store the same in a layer during prefill; None if no other method does.

    ``state`` is the method's empty state, or its shapes. Rows in host memory are not shared.
    """
    if not method.common_prompt or spec.offloaded:
        return None
    leaves, structure = jax.tree.flatten(state.cache)
    return structure, tuple((x.shape, x.dtype) for x in leaves)


def keeps_storage(before: Any, finished: Any) -> bool:
    """Tell whether a finished state has the very arrays that a state with `LayerMethod.common_prompt` had ``before``."""
    had, has = jax.tree.leaves(before.cache), jax.tree.leaves(finished.cache)
    return len(had) == len(has) and all(x is y for x, y in zip(had, has, strict=True))


def finish(method: LayerMethod, state: Any, spec: LayerSpec) -> Any:
    """Run `LayerMethod.finish`, traced once for equal layers; the arrays of a storage that is kept stay the same arrays."""
    made = run_shared(_without_kept, method, state, spec)
    return dataclasses.replace(made, cache=state.cache) if method.common_prompt and made.cache is None else made


def _without_kept(method: LayerMethod, state: Any, spec: LayerSpec) -> Any:
    """Run `LayerMethod.finish`; put None in the place of a storage that it leaves as it is."""
    made = method.finish(state, spec)
    kept = method.common_prompt and keeps_storage(state, made)
    return dataclasses.replace(made, cache=None) if kept else made


def stores_only(state: Any) -> bool:
    """Tell whether a state without its storage is empty: then no token can change it during prefill."""
    return not any(x.size for x in jax.tree.leaves(dataclasses.replace(state, cache=None)))


def barrier[Tree](tree: Tree) -> Tree:
    """Run `lax.optimization_barrier`; what was one array in several places of ``tree`` stays one array."""
    leaves, structure = jax.tree.flatten(tree)
    only = {id(leaf): leaf for leaf in leaves}
    held = dict(zip(only, lax.optimization_barrier(tuple(only.values())), strict=True))
    return jax.tree.unflatten(structure, [held[id(leaf)] for leaf in leaves])


@pytree
class Once:
    """Several caches, in which an array that several of them have exists once: what a program returns."""

    arrays: tuple[Array, ...]
    structures: tuple[Any, ...] = static("of each cache")
    places: tuple[tuple[int, ...], ...] = static("for each leaf of each cache, the index of its array")

    @classmethod
    def of(cls, caches: Sequence[Cache]) -> Once:
        """Find the arrays that several caches have in common; the leaves of one cache stay separate arrays."""
        found: dict[Hashable, int] = {}
        arrays, places = [], []
        for cache in caches:
            own: dict[int, int] = {}
            at = []
            for leaf in jax.tree.leaves(cache):
                own[id(leaf)] = own.get(id(leaf), 0) + 1
                place = found.setdefault((id(leaf), own[id(leaf)]), len(arrays))
                arrays += [leaf] * (place == len(arrays))
                at.append(place)
            places.append(tuple(at))
        structures = tuple(jax.tree.structure(cache) for cache in caches)
        return cls(arrays=tuple(arrays), structures=structures, places=tuple(places))

    @property
    def caches(self) -> list[Cache]:
        """The caches; some have arrays in common."""
        told = zip(self.structures, self.places, strict=True)
        return [jax.tree.unflatten(structure, [self.arrays[at] for at in places]) for structure, places in told]
