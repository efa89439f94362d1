"""Attention over keys of low rank in plain JAX: the listed rows are gathered, and their keys rebuilt."""

import jax
import jax.numpy as jnp

from pallas_kernels.attend.dense_decode import dense_decode
from pallas_kernels.attend.gather_attention.reference import listed_tokens, rotate_rows
from pallas_kernels.host import take_rows
from pallas_kernels.numerics import merge_with, product_precision


def low_rank_attention(query, left, right, value, pages, mask, *, page_size, inv_freq, scale, partials):
    """Rebuild the keys of listed pages from two factors, and attend to them, in plain JAX."""
    slots, listed = listed_tokens(pages, mask, page_size, value.shape[2], None)
    slots = jnp.where(listed, slots, 0)
    out, lse = dense_decode(
        query,
        rebuild(left, right, slots, inv_freq),
        take_rows(value, slots),
        position=jnp.where(listed, slots, -1),
        limit=jnp.full(slots.shape[:1], slots.shape[2], jnp.int32),
        scale=scale,
    )
    return (out, lse) if partials is None else merge_with(out, lse, *partials)


def rebuild(left: jax.Array, right: jax.Array, slots: jax.Array, inv_freq: jax.Array) -> jax.Array:
    """Rebuild keys from their factors, and rotate them by their slots.

    Args:
        left: [B, S, R].
        right: [B, H, R, D].
        slots: int32 [B, H, K], below S.
        inv_freq: float32 [D/2], radians per slot.

    Returns:
        [B, H, K, D] in the dtype of the factors.
    """
    rows = take_rows(left[:, None], slots)
    exact = product_precision(left.dtype)
    key = jnp.einsum("bhkr,bhrd->bhkd", rows, right, precision=exact, preferred_element_type=jnp.float32)
    return rotate_rows(key, slots, inv_freq).astype(left.dtype)
