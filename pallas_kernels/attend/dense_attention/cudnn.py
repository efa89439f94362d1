"""Attention over a cache with holes through cuDNN's flash attention, which adds a bias to its logits.

The bias hides the slots that a query does not see. It has a number for each query and slot of a KV head, and it is the only
array of that size: neither logits nor probabilities are in memory. Keys and values are copied, with zeros in empty slots.
There is no loop, so the host waits for no number that the device computes.
"""

import functools

import jax.numpy as jnp

from pallas_kernels import _cudnn
from pallas_kernels._mosaic.batching import rows_together
from pallas_kernels.attend.dense_attention.blocks import visible

MOST = 1 << 28  # numbers of the largest bias, and of the largest copies of keys and values: 512 MiB each
_UNIT = 8  # queries and slots are filled up to whole units, since cuDNN takes no bias of an odd length


def check(query, key, value, *, query_position, key_position, query_first, scale, limit, block):
    """Raise ``NotImplementedError`` for arrays that cuDNN does not take, for one query, and for large temporary arrays."""
    _cudnn.check(query, key, value)
    if key.shape != value.shape:
        raise NotImplementedError(f"got keys of {key.shape[3]} numbers and values of {value.shape[3]}, expected one width")
    rows, heads, _, tokens, _ = query.shape
    if tokens == 1 or not key.shape[2]:
        raise NotImplementedError(f"got {tokens} queries and {key.shape[2]} slots, expected several queries and a slot")
    if (numbers := max(rows * heads * tokens * key.shape[2], 2 * key.size)) > MOST:
        raise NotImplementedError(f"got {numbers} numbers in a bias, or in keys and values, expected at most {MOST}")


def dense_attention(query, key, value, *, query_position, key_position, query_first, scale, limit, block):
    """Attend to all tokens that each query sees, by cuDNN; ``limit`` and ``block`` change nothing."""
    first = jnp.zeros_like(query_position) if query_first is None else query_first
    run = rows_together(functools.partial(_attend, scale=scale))  # cuDNN under `vmap` takes no bias that heads share
    return run(query, key, value, query_position, key_position, first)


def _attend(query, key, value, asked, held, first, *, scale):
    rows, heads, group, tokens, dim = query.shape
    more, empty = (-n % _UNIT for n in (tokens, key.shape[2]))
    asked, first = (jnp.pad(x, [(0, 0), (0, more)], constant_values=-1) for x in (asked, first))
    held = jnp.pad(held, [(0, 0), (0, 0), (0, empty)], constant_values=-1)
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, more), (0, 0)])
    key, value = (jnp.where(held[..., None] >= 0, jnp.pad(x, [(0, 0), (0, 0), (0, empty), (0, 0)]), 0) for x in (key, value))
    # KV heads are rows: each has a bias of its own, which its query heads share.
    shape = (rows * heads, 1, tokens + more, held.shape[2])
    hidden = float(jnp.finfo(query.dtype).min) / 4  # finite, because a query may see nothing
    bias = jnp.where(visible(asked[:, None, :, None], held[:, :, None], first[:, None, :, None]), 0.0, hidden)
    out, lse = _cudnn.fused_attention(
        query.reshape(rows * heads, group, tokens + more, dim),
        *(x.reshape(rows * heads, 1, held.shape[2], dim) for x in (key, value)),
        scale=scale,
        bias=bias.astype(query.dtype).reshape(shape),
    )
    out, lse = (x.reshape(rows, heads, group, tokens + more, *x.shape[3:])[:, :, :, :tokens] for x in (out, lse))
    some = lse > hidden / 2
    return jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf)
