"""Collectives for code that runs on each device of a mesh; outside of `jax.shard_map` each collective is the identity.

The name of an axis says what is sharded over it: over ``data`` the rows of a batch, over ``model`` the KV heads and the
columns of the weights, over ``slots`` the slots of each row.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

DATA, MODEL, SLOTS = "data", "model", "slots"
NAMES = frozenset({DATA, MODEL, SLOTS})


def check_names(names: tuple[str, ...]) -> None:
    """Refuse an unknown name of a mesh's axis, and a mesh without axes.

    Raises:
        ValueError: an unknown axis name, or no axes.
    """
    if not names or not NAMES.issuperset(names):
        raise ValueError(f"the axes of a mesh must be among {DATA!r}, {MODEL!r} and {SLOTS!r}, got {names}")


def is_split(axis: str) -> bool:
    """Tell whether the code that is being traced runs on one shard of several along ``axis``."""
    mesh = jax.sharding.get_abstract_mesh()
    return axis in mesh.manual_axes and mesh.shape[axis] > 1


def size(axis: str) -> int:
    """Return the number of shards along ``axis``; 1 outside of `jax.shard_map`."""
    return lax.axis_size(axis) if is_split(axis) else 1


def index(axis: str) -> Array | int:
    """Return this shard's index along ``axis``, an int32 scalar; 0 outside of `jax.shard_map`."""
    return lax.axis_index(axis) if is_split(axis) else 0


def total(x: Array, axis: str = MODEL) -> Array:
    """Sum ``x``, of any shape and dtype, over the shards."""
    return lax.psum(x, axis) if is_split(axis) else x


def mean(x: Array, axis: str = MODEL) -> Array:
    """Average ``x`` over the shards, which all have equally many heads or rows."""
    return lax.pmean(x, axis) if is_split(axis) else x


def most(x: Array, axis: str = MODEL) -> Array:
    """Reduce ``x`` to its elementwise maximum over the shards."""
    return lax.pmax(x, axis) if is_split(axis) else x


def every(x: Array, axis: str = DATA) -> Array:
    """Tell, element by element, whether ``x`` bool is true on all shards: bool of its shape."""
    return lax.pmin(x.astype(jnp.int32), axis) > 0 if is_split(axis) else x


def joined(x: Array, dim: int, axis: str = MODEL) -> Array:
    """Concatenate ``x`` of all shards along ``dim``."""
    return lax.all_gather(x, axis, axis=dim, tiled=True) if is_split(axis) else x
