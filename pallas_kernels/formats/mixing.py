"""A rotation that spreads each channel of a vector over all channels, so that few codes hold the vector well.

It is the Walsh-Hadamard matrix divided by the square root of its size: entries of one size, with signs. Applied twice it
changes nothing. A vector whose number of channels is no power of two is mixed in blocks, each as large as the largest power
of two that divides this number.
"""

import math

import jax
import jax.numpy as jnp


def block_of(dim: int) -> int:
    """Return the channels of a block of `mix`, for vectors of ``dim`` channels."""
    return dim & -dim


def mix(x: jax.Array) -> jax.Array:
    """Rotate ``x`` float32 [..., D], so that each channel is spread over all channels of its block.

    Channel i and channel i + half of a block become their sum and their difference, and then each half does the same. The
    order of additions depends on no other axis, so a vector has the same result in every batch.
    """
    block = block_of(x.shape[-1])
    shape = x.shape
    blocks = (*shape[:-1], shape[-1] // block, block)
    x = x.reshape(blocks) * (1 / math.sqrt(block))  # first, so that no sum of finite numbers overflows
    half = block // 2
    while half:
        low, high = jnp.split(x.reshape(*blocks[:-1], block // (2 * half), 2, half), 2, axis=-2)
        x = jnp.concatenate([low + high, low - high], axis=-2).reshape(blocks)
        half //= 2
    return x.reshape(shape)


def mix_few(x: jax.Array) -> jax.Array:
    """Rotate ``x`` [..., D] as `mix` does, by a product with `signs`: short launches on a GPU for queries and outputs.

    Sums are float32, and the result has the dtype of ``x``. It can differ from `mix` in the last bits.
    """
    block = block_of(x.shape[-1])
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    made = jnp.matmul(
        x.reshape(*x.shape[:-1], x.shape[-1] // block, block), signs(block).astype(x.dtype), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return (made * (1 / math.sqrt(block))).astype(x.dtype).reshape(x.shape)


def signs(size: int) -> jax.Array:
    """Build the matrix of `mix` without its factor, for ``size`` channels, a power of two: float32 [size, size], 1 and -1.

    Entry (i, j) is -1 where i and j have an odd number of bits in common. It can be built within a kernel.
    """
    row, column = jnp.arange(size, dtype=jnp.int32)[:, None], jnp.arange(size, dtype=jnp.int32)[None, :]
    return 1.0 - 2.0 * (jax.lax.population_count(row & column) & 1).astype(jnp.float32)
