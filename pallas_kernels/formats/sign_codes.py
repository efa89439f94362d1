"""Locality-sensitive hashing by signs: the bits of a vector say on which side of random planes it lies (SOCKET, MagicPIG)."""

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.numerics import drawn

BLOCK = 16  # tokens whose buckets of a table are neighbours in memory
_EXACT = jax.lax.Precision.HIGHEST


def random_planes(seed: Array | int, tables: int, bits: int, dim: int) -> Array:
    """Draw normal vectors of planes through 0 from a Gaussian: float32 [L, P, D] for L ``tables`` of P ``bits``."""
    return drawn(lambda key: jax.random.normal(key, (tables, bits, dim), jnp.float32), seed)


def projections(x: Array, planes: Array) -> Array:
    """Multiply vectors [..., D] with the normal vectors float32 [L, P, D]: float32 [..., L, P]."""
    return jnp.einsum("...d,lpd->...lp", x.astype(jnp.float32), planes, precision=_EXACT)


def buckets(x: Array, planes: Array) -> Array:
    """Hash each vector into a bucket of each table: its bits as a number, the first plane's bit being the highest.

    A bit is 1 where the product is not negative.

    Args:
        x: [..., D].
        planes: float32 [L, P, D], P at most 16.

    Returns:
        [..., L], uint8 for up to 8 bits, else uint16.
    """
    bits = planes.shape[1]
    place = jnp.asarray([1 << (bits - 1 - bit) for bit in range(bits)], jnp.int32).reshape((1,) * x.ndim + (-1,))
    number = jnp.sum(jnp.where(projections(x, planes) >= 0, place, 0), axis=-1)
    return number.astype(jnp.uint8 if bits <= 8 else jnp.uint16)


def in_blocks(ids: Array) -> Array:
    """Arrange buckets as they are stored: block by block, and in a block table by table, `BLOCK` tokens each.

    Args:
        ids: [..., S, L], the bucket of each token in each table.

    Returns:
        [..., N, L * BLOCK], where N is S / BLOCK rounded up; 0 behind the last token.
    """
    *lead, slots, tables = ids.shape
    ids = jnp.pad(ids, [(0, 0)] * len(lead) + [(0, -slots % BLOCK), (0, 0)])
    return ids.reshape(*lead, -1, BLOCK, tables).swapaxes(-1, -2).reshape(*lead, -1, tables * BLOCK)


def by_tables(blocks: Array, tables: int) -> Array:
    """Arrange the buckets of blocks [..., N, L * BLOCK] table by table: [..., L, N * BLOCK]."""
    *lead, count, _ = blocks.shape
    return jnp.moveaxis(blocks.reshape(*lead, count, tables, BLOCK), -2, -3).reshape(*lead, tables, count * BLOCK)


def corners(bits: int) -> Array:
    """List the sign of each bit in each bucket: float32 [2**bits, bits], each -1 or 1."""
    place = jnp.arange(bits - 1, -1, -1, dtype=jnp.int32)[None]
    return ((jnp.arange(1 << bits, dtype=jnp.int32)[:, None] >> place & 1) * 2 - 1).astype(jnp.float32)


def norms(x: Array) -> Array:
    """Compute the Euclidean norm of vectors [..., D]: float32 [...]."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
