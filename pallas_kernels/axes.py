"""Sums over devices, for code of which each device of a mesh runs its part; outside of `jax.shard_map` each is the identity.

The names of the axes say what is spread over the devices: over ``data`` the rows of a batch, over ``model`` the KV heads and
the columns of the weights, over ``slots`` the slots of each row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

DATA, MODEL, SLOTS = "data", "model", "slots"
NAMES = frozenset({DATA, MODEL, SLOTS})


def check_names(names: tuple[str, ...]) -> None:
    """Refuse a mesh's axes of which one has another name, and a mesh without axes.

    Raises:
        ValueError: so it is.
    """
    if not names or not NAMES.issuperset(names):
        raise ValueError(f"the axes of a mesh must be among {DATA!r}, {MODEL!r} and {SLOTS!r}, got {names}")


def is_split(axis: str) -> bool:
    """Whether the code that is being traced is one device's part along ``axis``, of more than one."""
    mesh = jax.sharding.get_abstract_mesh()
    return axis in mesh.manual_axes and mesh.shape[axis] > 1


def size(axis: str) -> int:
    """The number of parts along ``axis``; 1 outside."""
    return lax.axis_size(axis) if is_split(axis) else 1


def index(axis: str) -> Array | int:
    """The number of this part along ``axis``, an int32 scalar; 0 outside."""
    return lax.axis_index(axis) if is_split(axis) else 0


def total(x: Array, axis: str = MODEL) -> Array:
    """The sum of the parts, of any shape and dtype."""
    return lax.psum(x, axis) if is_split(axis) else x


def mean(x: Array, axis: str = MODEL) -> Array:
    """The mean of the parts, which all are over equally many heads or rows."""
    return lax.pmean(x, axis) if is_split(axis) else x


def most(x: Array, axis: str = MODEL) -> Array:
    """The largest of the parts, element by element."""
    return lax.pmax(x, axis) if is_split(axis) else x


def every(x: Array, axis: str = DATA) -> Array:
    """Whether a truth value holds in all parts: bool of the shape of ``x``."""
    return lax.pmin(x.astype(jnp.int32), axis) > 0 if is_split(axis) else x


def joined(x: Array, dim: int, axis: str = MODEL) -> Array:
    """All parts, one behind the other along ``dim``."""
    return lax.all_gather(x, axis, axis=dim, tiled=True) if is_split(axis) else x
