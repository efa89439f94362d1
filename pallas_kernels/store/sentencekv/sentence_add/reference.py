"""Adding a token to the open sentence, in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES
from pallas_kernels.host import copy_row


def sentence_add(key, query, cursor, event, state, *, rows=None):
    """Add a token to the open sentence, and close the sentence where it ends, in plain JAX."""
    sentence, mean, count, query_sum, key_sum, length = state
    batch, heads, num_slots = sentence.shape
    active, ends = event > 0, (event == CLOSES)[:, None]
    slot = cursor - 1
    b, h = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    at = jnp.clip(slot, 0, num_slots - 1)[:, None]
    row = key[b, h, at if rows is None else copy_row(at, rows.sinks, key.shape[2])]
    key_sum = key_sum + jnp.where(active[:, None, None], row, 0).astype(jnp.float32)
    query_sum = query_sum + jnp.where(active[:, None, None, None], query, 0).astype(jnp.float32)
    length = length + active.astype(jnp.int32)[:, None]
    whole = key_sum / jnp.maximum(length, 1).astype(jnp.float32)[..., None]
    closing = jnp.where(ends, count, mean.shape[2])  # an index past the end is dropped
    return (
        sentence.at[b, h, jnp.where(active, slot, num_slots)[:, None]].set(count, mode="drop"),
        mean.at[b, h, closing].set(whole.astype(mean.dtype), mode="drop"),
        count + ends.astype(jnp.int32),
        jnp.where(ends[..., None, None], 0, query_sum),
        jnp.where(ends[..., None], 0, key_sum),
        jnp.where(ends, 0, length),
    )
