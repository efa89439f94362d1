"""The bounds of the newest page, widened in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.host import copy_row


def widen_page(key, position, cursor, low, high, *, page_size, rows=None):
    """Widen the bounds of the newest page by the newest key, in plain JAX."""
    batch, heads, num_slots = position.shape
    b, h = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    slot = jnp.clip(cursor - 1, 0, num_slots - 1)[:, None]
    new = key[b, h, slot if rows is None else copy_row(slot, rows.sinks, key.shape[2])]
    held = (position[b, h, slot] >= 0) & ((cursor > 0) & (cursor <= num_slots))[:, None]
    at = b, h, slot // page_size
    # Bounds of inf and -inf, or NaN, compare false: the first key of a page is both of its bounds.
    below, above = held[..., None] & ~(low[at] <= new), held[..., None] & ~(high[at] >= new)
    return low.at[at].set(jnp.where(below, new, low[at])), high.at[at].set(jnp.where(above, new, high[at]))
