"""Estimates from a prompt's text: how many keys a head attends to (XAttention, FlexPrefill), and by which pattern.

`kvjax.attention.sparse` calls these functions. No array has both an axis of queries and an axis of keys: scores are of blocks
of queries and blocks of keys.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import rel_entr

from pallas_kernels.numerics import product_precision

_ENTRIES = 1 << 24  # the most logits, or sums of them, of `antidiagonal_scores` that are in memory at once


def kept_by_share(weight: Array, certain: Array, share: Array) -> Array:
    """Mask the smallest set of entries per row that holds ``share`` of the row's sum; ``certain`` entries are always in it.

    The certain entries count first. Then come the largest other entries; equal entries are kept all or none. Rows are long
    here (all tokens of a prompt), so the smallest kept weight is searched by bisection and nothing is sorted.

    Args:
        weight: float32 [..., N], at least 0.
        certain: bool, with the axes of ``weight``, some of size 1: entries that are kept whatever they weigh.
        share: float32 from 0 to 1, with the axes [...], some of size 1; 1 keeps every entry.

    Returns:
        bool [..., N].
    """
    others = jnp.where(certain, 0, weight)
    spare = (1 - share) * weight.sum(axis=-1)  # what may be left out
    # Floats of at least 0 have the order of their bits. The answer is the largest threshold below which little enough lies.
    order = lax.bitcast_convert_type(others, jnp.int32)

    def add_bit(step: Array, least: Array) -> Array:
        tried = least | (1 << (30 - step))
        left = jnp.where(order < tried[..., None], others, 0).sum(axis=-1)
        return jnp.where(left <= spare, tried, least)

    least = lax.fori_loop(0, 31, add_bit, jnp.zeros(weight.shape[:-1], jnp.int32))
    return certain | (order >= least[..., None]) | (share >= 1)[..., None]


def block_means(x: Array, real: Array, block: int) -> Array:
    """Average over the real tokens of each block.

    Args:
        x: [B, ..., T, D]; entries of tokens that are not real may be anything.
        real: bool [B, T].

    Returns:
        [B, ..., ceil(T / block), D] in the dtype of ``x``; 0 where a block has no real token.
    """
    blocks = -(-x.shape[-2] // block)
    behind = blocks * block - x.shape[-2]
    real = jnp.pad(real, [(0, 0), (0, behind)]).reshape(len(real), *(1,) * (x.ndim - 3), blocks, block, 1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, behind), (0, 0)]).reshape(*x.shape[:-2], blocks, block, x.shape[-1])
    sums = jnp.where(real, x, 0).sum(axis=-2, dtype=jnp.float32)
    return (sums / jnp.maximum(real.sum(axis=-2, dtype=jnp.float32), 1)).astype(x.dtype)


def mean_logits(query: Array, key: Array) -> Array:
    """Compute the logits of mean queries [B, H, G, N, D] and mean keys [B, H, P, D]: float32 [B, H, G, N, P]."""
    made = jnp.einsum(
        "bhgnd,bhpd->bhgnp", query, key, precision=product_precision(query.dtype), preferred_element_type=jnp.float32
    )
    return made / math.sqrt(query.shape[-1])


def divergence(logits: Array, weight: Array) -> Array:
    """Measure the error of an estimate: the square root of its Jensen-Shannon divergence from the truth, in nats.

    Args:
        logits: float32 [..., N], whose softmax is the estimate; -inf for impossible entries.
        weight: float32 [..., N], at least 0; in proportion to the truth.

    Returns:
        float32 [...], from 0 to sqrt(log 2) = 0.83.
    """
    estimate, total = jax.nn.softmax(logits, axis=-1), weight.sum(axis=-1, keepdims=True)
    truth = weight / jnp.where(total > 0, total, 1)
    middle = (estimate + truth) / 2
    return jnp.sqrt(jnp.maximum((rel_entr(estimate, middle) + rel_entr(truth, middle)).sum(axis=-1) / 2, 0))


def antidiagonal_scores(query: Array, key: Array, start: Array, total: Array, block: int, stride: int) -> Array:
    """Estimate as XAttention does how much attention each block of queries pays to each block of keys.

    ``stride`` consecutive queries form one vector of ``stride * D`` values, and so do ``stride`` keys in reverse order. The
    product of two such vectors is the sum of a piece of an antidiagonal; over all pieces every token counts once. The softmax
    is causal, over these vectors; the score of a pair of blocks is the sum of the softmax over the pair.

    Args:
        query: [B, H, G, T, D], rotated.
        key: [B, H, S, D], rotated.
        start: int32 scalar, the slot of the first query, a multiple of ``block``.
        total: int32 [B], real tokens in the cache; keys past them, and the queries of such slots, may be anything.

    Returns:
        float32 [B, H, G, N, P] for N = ceil(T / block) and P = ceil(S / block). The sum over P is the number of vectors of
        queries in the block that have a real token.
    """
    batch, heads, group, tokens, dim = query.shape
    slots, parts = key.shape[2], block // stride
    blocks, key_blocks = -(-tokens // block), -(-slots // block)
    # `together` blocks of queries are scored at once, with sums for all blocks of keys and logits for `width` blocks of keys.
    together, steps = _pieces(blocks, _ENTRIES // (batch * heads * group * parts * key_blocks))
    width, tiles = _pieces(key_blocks, _ENTRIES // (batch * heads * group * parts * parts * together))
    vectors = together * parts
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, steps * together * block - tokens), (0, 0)])
    scale = 1 / (stride * math.sqrt(dim))

    def score(step: Array) -> Array:
        """Score ``together`` blocks of queries."""
        at = step * (vectors * stride) + jnp.arange(vectors * stride, dtype=jnp.int32)
        real = (start + at[None] < total[:, None])[:, None, None, :, None]
        asking = jnp.where(real, lax.dynamic_slice_in_dim(query, at[0], vectors * stride, 3), 0)
        asking = asking.reshape(batch, heads, group, vectors, stride * dim)
        own = (start // stride + step * vectors + jnp.arange(vectors, dtype=jnp.int32))[None]

        def add(tile: Array, sums: Array) -> Array:
            slot = tile * (width * block) + jnp.arange(width * block, dtype=jnp.int32)
            there = (slot[None] < total[:, None])[:, None, :, None]
            keys = jnp.where(there, jnp.take(key, jnp.minimum(slot, slots - 1), axis=2), 0)
            keys = keys.reshape(batch, heads, width * parts, stride, dim)[:, :, :, ::-1]
            logits = scale * jnp.einsum(
                "bhguc,bhvc->bhguv",
                asking,
                keys.reshape(batch, heads, width * parts, stride * dim),
                precision=product_precision(query.dtype),
                preferred_element_type=jnp.float32,
            )
            other = (tile * (width * parts) + jnp.arange(width * parts, dtype=jnp.int32))[None, None]
            seen = (other <= own[..., None]) & (other * stride < total[:, None, None])
            logits = jnp.where(seen[:, None, None], logits, -jnp.inf).reshape(*asking.shape[:4], width, parts)
            return lax.dynamic_update_slice_in_dim(sums, jax.nn.logsumexp(logits, axis=5), tile * width, 4)

        sums = jnp.full((*asking.shape[:4], tiles * width), -jnp.inf, jnp.float32)
        last = start // block + (step + 1) * together  # one more than the last block that any of these queries sees
        sums = lax.fori_loop(0, jnp.minimum((last + width - 1) // width, tiles), add, sums)[..., :key_blocks]
        asked = (own * stride < total[:, None])[:, None, None, :, None]
        share = jnp.where(asked, jax.nn.softmax(sums, axis=4), 0)
        return share.reshape(batch, heads, group, together, parts, key_blocks).sum(axis=4)

    made = lax.map(score, jnp.arange(steps, dtype=jnp.int32))
    return jnp.moveaxis(made, 0, 3).reshape(batch, heads, group, -1, key_blocks)[:, :, :, :blocks]


def _pieces(number: int, most: int) -> tuple[int, int]:
    """Divide ``number`` into equal pieces of at most ``most`` and at least 1; return their size and how many there are."""
    size = -(-number // -(-number // max(1, most)))
    return size, -(-number // size)
