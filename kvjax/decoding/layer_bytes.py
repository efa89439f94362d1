"""The bytes of one layer under a method, while a prompt is read and afterwards, from shapes alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from kvjax.decoding.shared_storage import keeps_storage, storage_key
from kvjax.mesh.sharding import on_each
from kvjax.protocol.method import LayerMethod, LayerSpec
from pallas_kernels.machine import Machine, current_machine


@dataclasses.dataclass(frozen=True)
class Stored:
    """The bytes of a layer's state.

    Attributes:
        device: bytes on the device.
        host: bytes in pinned host memory.
        key: what is equal for methods that store the same (`storage_key`); None if no other method does.
        common: the part of ``device`` that methods of equal keys may share.
    """

    device: int
    host: int
    key: Hashable = None
    common: int = 0


@dataclasses.dataclass(frozen=True)
class LayerBytes:
    """The bytes of some rows of a layer.

    Attributes:
        reading: of the state while the prompt is read.
        kept: of the finished state.
        same: of the arrays on the device that both have.
    """

    reading: Stored
    kept: Stored
    same: int

    @property
    def made(self) -> int:
        """The bytes on the device that `LayerMethod.finish` makes anew."""
        return self.kept.device - self.same


def by_shapes[**P, Found](run: Callable[P, Found], most: int = 1024) -> Callable[P, Found]:
    """Keep what a function finds for the shapes in its positional arguments, which are pytrees, and what else it is given."""

    @functools.lru_cache(maxsize=most)
    def known(kind: Any, leaves: tuple[Any, ...], machine: Machine, fixed: tuple[tuple[str, Any], ...]) -> Found:
        return cast("Any", run)(*jax.tree.unflatten(kind, leaves), **dict(fixed))

    @functools.wraps(run)
    def of_shapes(*trees: P.args, **fixed: P.kwargs) -> Found:
        leaves, kind = jax.tree.flatten(trees)
        return known(kind, tuple(map(jax.api_util.shaped_abstractify, leaves)), current_machine(), tuple(fixed.items()))

    return of_shapes


@by_shapes
def layer_bytes(
    method: LayerMethod, *, reading: LayerSpec, spec: LayerSpec, mesh: Mesh | AbstractMesh | None = None
) -> LayerBytes:
    """Count the bytes of a layer's state on each device; nothing is computed.

    Args:
        method: of the layer; the values of its traced fields do not matter.
        reading: the sizes of its storage while the prompt is read.
        spec: those of the finished layer.
        mesh: the devices if they divide the slots of a row, outside of `jax.shard_map`.
    """
    mesh = None if spec.parts == 1 else mesh
    state = jax.eval_shape(each_device(mesh, lambda method: method.init(reading)), method)
    _, made, (key, kept, same) = finish_program(method, state, reading=reading, spec=spec, mesh=mesh)
    common = 0 if key is None else placed_bytes(state.cache)[0]
    return LayerBytes(
        reading=Stored(*placed_bytes(state), key, common),
        kept=Stored(*placed_bytes(made), key if kept else None, common if kept else 0),
        same=same,
    )


@functools.partial(by_shapes, most=64)  # they are large, and asked for again soon
def finish_program(
    method: LayerMethod, state: Any, *, reading: LayerSpec, spec: LayerSpec, mesh: Mesh | AbstractMesh | None
) -> tuple[Any, Any, tuple[Hashable, bool, int]]:
    """Trace `LayerMethod.finish`; arguments as in `layer_bytes`, and the shapes of the state that read the prompt.

    Returns:
        The program, the shapes of the finished state, and what both states have in common: the name of the storage
        (`storage_key`), whether the finished state keeps it, and the bytes of the arrays on the device that are in both.
    """
    found: list[tuple[Hashable, bool, int]] = []

    def finish(method: LayerMethod, state: Any) -> Any:
        made = method.finish(state, spec)
        key, had = storage_key(method, reading, state), {id(x) for x in jax.tree.leaves(state)}
        kept = key is not None and keeps_storage(state, made)
        found.append((key, kept, placed_bytes([x for x in jax.tree.leaves(made) if id(x) in had])[0]))
        return made

    program, made = jax.make_jaxpr(each_device(mesh, finish), return_shape=True)(method, state)
    return program.jaxpr, made, found[-1]


def each_device(mesh: Mesh | AbstractMesh | None, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``run`` as each device of a mesh runs it."""
    return run if mesh is None else on_each(mesh, run)


def placed_bytes(tree: Any) -> tuple[int, int]:
    """Count the bytes of all arrays of ``tree``, or of their shapes, on the device, and in host memory."""
    sizes = [(jax.typeof(x), x.size * x.dtype.itemsize) for x in jax.tree.leaves(tree)]
    host = sum(size for kind, size in sizes if kind.memory_space == jax.memory.Space.Host)
    return sum(size for _, size in sizes) - host, host
