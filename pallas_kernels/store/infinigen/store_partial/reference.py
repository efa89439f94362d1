"""The store of the newest partial key and query in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.host import copy_row


def store_partial(key, position, cursor, matrix, query, place, partial, last, *, rows=None):
    """Store the partial key of the newest token and the step's query, in plain JAX."""
    batch, heads, num_slots = position.shape
    b, h = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    slot = jnp.clip(cursor - 1, 0, num_slots - 1)[:, None]
    new = key[b, h, slot if rows is None else copy_row(slot, rows.sinks, key.shape[2])]
    held = (position[b, h, slot] >= 0) & ((cursor > 0) & (cursor <= num_slots))[:, None]
    product = jnp.einsum("bhd,bhdc->bhc", new.astype(jnp.float32), matrix, precision=jax.lax.Precision.HIGHEST)
    at = b, h, slice(None), slot
    partial = partial.at[at].set(jnp.where(held[..., None], product.astype(partial.dtype), partial[at]))
    return partial, jnp.where((place >= 0)[:, None, None, None], query, last)
