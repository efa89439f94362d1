"""What the timed shapes of all operations share: their base class, sizes of an 8B model, and random arrays.

Every operation keeps its own shapes in the file ``timed.py`` of its folder. No kernel imports that file: whoever times the
kernels does.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.formats.packed_vectors import words_of

GROUP = 4  # query heads per KV head
BYTES = 2  # of a bfloat16
CONTEXT = 131072  # tokens of a long context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape(abc.ABC):
    """Sizes at which an operation is timed: a subclass adds sizes as fields, with the sizes of a Llama-3.1-8B layer.

    Attributes:
        heads: KV heads H.
        dim: channels D of a head.
        chained: the float argument that a timing loop makes depend on the run before; None if the loop passes another array.
        tolerance: largest relative error of floats; integers and truth values must be equal.
        float32: whether the reference is plain JAX on float32; otherwise it is plain JAX on the same arrays.
    """

    heads: int = 8
    dim: int = 128
    chained: ClassVar[str | None] = "query"
    tolerance: ClassVar[float] = 0.02
    float32: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The shape in words, unique among the shapes of an operation."""

    @property
    @abc.abstractmethod
    def bytes_read(self) -> int:
        """Bytes that every implementation must read: over the bandwidth, the floor of its time."""

    @property
    @abc.abstractmethod
    def options(self) -> dict[str, Any]:
        """Arguments of the operation that are no arrays, by name."""

    @abc.abstractmethod
    def draw(self, key: Array) -> dict[str, Any]:
        """Draw the arrays that the operation takes, by the names of its arguments.

        Args:
            key: a typed PRNG key, as ``jax.random.key`` makes it.
        """

    @abc.abstractmethod
    def tiny(self) -> Self:
        """Return the shape in sizes that a test can run."""

    def defined(self, result: Any) -> Any:
        """Return the part of a result that all implementations agree on."""
        return result

    @property
    def rows(self) -> tuple[int, int]:
        """One row of a batch, and the KV heads."""
        return 1, self.heads

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return 1 / math.sqrt(self.dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongZone(Shape):
    """Keys between two stretches that ParisKV always attends to; a tenth of them become candidates.

    Attributes:
        slots: tokens of a row.
    """

    slots: int = CONTEXT

    @property
    def first(self) -> int:
        """The first slot of the zone; as many slots follow it."""
        return self.slots // 16

    @property
    def zone(self) -> int:
        """Keys of the zone."""
        return self.slots - 2 * self.first

    @property
    def room(self) -> int:
        """Capacity of the lists of candidates."""
        return math.ceil(self.zone / 10)


def small[S: Shape](shape: S, **sizes: Any) -> S:
    """Return ``shape`` with two heads of 16 channels, and with ``sizes``."""
    return dataclasses.replace(shape, heads=2, dim=16, **sizes)


def few(number: int) -> int:
    """Divide a number of slots or pages by 512, to 16 at least."""
    return max(16, number // 512)


def normal(key: Array, *shape: int, dtype: DTypeLike = jnp.bfloat16) -> Array:
    """Draw standard normal values."""
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def query_key_value(key: Array, shape: Shape, slots: int, batch: int = 1) -> tuple[Array, Array, Array]:
    """Draw the query of a decode step [B, H, G, D], and key and value of a cache [B, H, S, D]."""
    rows, keys = (batch, shape.heads), jax.random.split(key, 3)
    return (
        normal(keys[0], *rows, GROUP, shape.dim),
        normal(keys[1], *rows, slots, shape.dim),
        normal(keys[2], *rows, slots, shape.dim),
    )


def positions(rows: tuple[int, int], slots: int) -> Array:
    """Return the positions of a full cache: int32 [B, H, S], 0..S-1 in every head."""
    return jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (*rows, slots))


def lists(key: Array, rows: tuple[int, ...], most: int, count: int) -> Array:
    """Draw lists of ``count`` different numbers below ``most``, in ascending order: int32 [*rows, K]."""

    def draw(key: Array) -> Array:
        return jnp.sort(jax.random.choice(key, most, (count,), replace=False))

    return jax.vmap(draw)(jax.random.split(key, math.prod(rows))).reshape(*rows, count).astype(jnp.int32)


def orthogonal(key: Array, *lead: int, dim: int) -> Array:
    """Draw orthogonal bases: float32 [*lead, D, D]."""
    return jnp.linalg.qr(normal(key, *lead, dim, dim, dtype=jnp.float32))[0]


def packed(key: Array, lead: tuple[int, ...], dim: int, rank: int) -> tuple[Array, Array]:
    """Draw packed vectors: random values [*lead, r], and bitmaps of r different channels each."""
    keys = jax.random.split(key, 3)
    odd, shift = (jax.random.randint(key, (*lead, 1), 0, dim, jnp.int32) for key in keys[:2])
    channel = jnp.arange(dim, dtype=jnp.int32).reshape((1,) * len(lead) + (dim,))
    # Below a power of two, multiplication by an odd number is a permutation of the integers.
    kept = (channel * (2 * odd + 1) + shift) % dim < rank
    bit = jnp.left_shift(jnp.int32(1), jnp.arange(8, dtype=jnp.int32)).reshape((1,) * (len(lead) + 1) + (8,))
    bitmap = jnp.sum(jnp.where(kept.reshape(*lead, dim // 8, 8), bit, 0), axis=-1).astype(jnp.uint8)
    return normal(keys[2], *lead, rank), words_of(bitmap)
