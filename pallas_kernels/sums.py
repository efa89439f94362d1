"""Ways to sum what the devices along an axis of a mesh have; each runs inside `jax.shard_map`.

A decode step sums some kilobytes per layer, so the time of a sum is the time to start it. XLA's own sum is not the fastest
way everywhere: `experiments.collectives` times all of them. `pallas_kernels.axes.summed_by` chooses one.

Whichever way it is, all devices get the same bits: a part of the sum is made on one device, or everywhere in the order of
the devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.peer_sum import can_take, peer_sum


def _gather(x: Array, axis: str) -> Array:
    """Each device gets all parts, and adds them itself."""
    return _added(lax.all_gather(x, axis))


def _scatter(x: Array, axis: str) -> Array:
    """Each device sums its share of the elements, and gets the shares of the others."""
    return lax.all_gather(lax.psum_scatter(x.reshape(-1), axis, tiled=True), axis, tiled=True).reshape(x.shape)


def _permute(x: Array, axis: str) -> Array:
    """The parts go round, from each device to the next one; between two devices they change places."""
    count, parts = lax.axis_size(axis), [x]
    for _ in range(count - 1):
        parts.append(lax.ppermute(parts[-1], axis, [(one, (one + 1) % count) for one in range(count)]))
    # What came i steps ago left the device i places before this one.
    return _added(jnp.stack(parts)[(lax.axis_index(axis) - jnp.arange(count)) % count]) if count > 2 else _added(parts)


def _added(parts: Array | list[Array]) -> Array:
    kind = parts[0].dtype
    wide = jnp.float32 if jnp.issubdtype(kind, jnp.floating) and kind.itemsize < 4 else kind
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = total + part.astype(wide)
    return total.astype(kind)


@dataclasses.dataclass(frozen=True)
class Sum:
    """A way to sum.

    Attributes:
        run: ``run(x, axis)`` is the sum along the axis, of the shape and dtype of ``x``.
        takes: whether it can sum arrays like ``x`` over so many devices.
    """

    run: Callable[[Array, str], Array]
    takes: Callable[[Array | jax.ShapeDtypeStruct, int], bool]


SUMS = {
    "psum": Sum(lax.psum, lambda x, devices: True),
    "gather": Sum(_gather, lambda x, devices: True),
    "scatter": Sum(_scatter, lambda x, devices: x.size % devices == 0),
    "permute": Sum(_permute, lambda x, devices: True),
    "peer": Sum(peer_sum, can_take),
}
