"""Attention to what MosaicKV stores: scores of packed block means, and packed tokens under one softmax with the buffer."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.mosaic_store import Store, owner
from kvjax.mosaic_strategy import Layout, Packed, exact
from kvjax.packing import unpack
from kvjax.selection import page_slots


def visible_blocks(layout: Layout, store: Store) -> Array:
    """Which stored blocks may be attended to, bool [B, 1, P]."""
    return jnp.arange(store.block.values.shape[2])[None, None] < (store.packed // layout.granule)[:, None, None]


def count_blocks(layout: Layout, store: Store, segment: Array, segments: int) -> Array:
    """Visible blocks in each of ``segments`` N, for the segment int32 [B, 1, P] of every block: int32 [B, N]."""
    mine = segment[..., None] == jnp.arange(segments)[None, None, None]
    return jnp.sum(mine & visible_blocks(layout, store)[..., None], axis=(1, 2), dtype=jnp.int32)


def block_slots(layout: Layout, store: Store) -> Array:
    """First slot of every block, int32 [1, 1, P]."""
    return (jnp.arange(store.block.values.shape[2], dtype=jnp.int32) * layout.granule)[None, None]


def block_scores(layout: Layout, store: Store, query: Array) -> Array:
    """Query [B, H, G, D] times the packed mean of every block, float32 [B, H, G, P]."""
    turned = jnp.einsum("bhgd,bhned->bhgne", query.astype(jnp.float32), store.segments.basis_key, **exact)
    prompt, fits = store.prompt_segments, store.num_segments - store.prompt_segments
    per_piece, blocks = layout.segment // layout.granule, store.block.values.shape[2]
    row, scores = jnp.arange(query.shape[0]), []
    # A prompt-sized piece of slots belongs to one prompt segment per row, or to segments fitted on output.
    for piece, first in enumerate(range(0, blocks, per_piece)):
        at = slice(first, min(first + per_piece, blocks))
        own = jnp.minimum(piece, store.last)
        query_of = jnp.concatenate([turned[row, :, :, own][:, :, :, None], turned[:, :, :, prompt:]], axis=3)
        mean = unpack(store.block.values[:, :, at], store.block.bitmap[:, :, at], layout.dim).astype(jnp.float32)
        score = jnp.einsum("bhgne,bhpe->bhgnp", query_of, mean, **exact)
        segment = owner(layout, store, block_slots(layout, store)[..., at])
        index = jnp.maximum(segment - prompt + 1, 0)  # 0 is the piece's own
        member = index[:, :, None, None] == jnp.arange(1 + fits)[None, None, None, :, None]
        scores.append(jnp.where(member, score, 0).sum(axis=3))
    return jnp.concatenate(scores, axis=-1)


def attend_packed(
    layout: Layout,
    store: Store,
    cache: LayerCache,
    query: Array,
    position: Array,
    blocks: Array | None,
    keep: Array,
) -> Array:
    """Attention over packed blocks and the buffer under one softmax; the cache is never rotated back, the output is.

    Args:
        layout: static sizes.
        store: packed tokens.
        cache: the buffer, the new tokens included.
        query: [B, H, G, T, D], rotated by position.
        position: int32 [B, T].
        blocks: int32 [B, H, K], or None for all.
        keep: bool [B, H, K], blocks to attend to.

    Returns:
        [B, H, G, T, D] in the dtype of the query.
    """

    def rows(packed: Packed) -> Array:
        def take(x: Array) -> Array:
            if blocks is None:
                return x
            x = x.reshape(*x.shape[:2], -1, layout.granule, x.shape[-1])
            x = jnp.take_along_axis(x, blocks[..., None, None], axis=2)
            return x.reshape(*x.shape[:2], -1, x.shape[-1])

        return unpack(take(packed.values), take(packed.bitmap), layout.dim).astype(jnp.float32)

    slots = store.key.values.shape[2]
    slot = jnp.arange(slots, dtype=jnp.int32)[None, None] if blocks is None else page_slots(blocks, layout.granule)
    segments = jnp.arange(store.num_segments).reshape(1, 1, 1, 1, -1, 1)
    member = owner(layout, store, slot)[:, :, None, None, None] == segments
    asked = query.astype(jnp.float32) / math.sqrt(layout.dim)
    turned = jnp.einsum("bhgtd,bhned->bhgtne", asked, store.segments.basis_key, **exact)
    logits = jnp.einsum("bhgtne,bhke->bhgtnk", turned, rows(store.key), **exact)
    logits = jnp.where(member, logits, 0).sum(axis=4)
    held = cache.valid[..., None]
    key, value = (jnp.where(held, x, 0).astype(jnp.float32) for x in (cache.key, cache.value))
    logits = jnp.concatenate([logits, jnp.einsum("bhgtd,bhsd->bhgts", asked, key, **exact)], axis=-1)
    stored, now = cache.position[:, :, None, None], position[:, None, None, :, None]
    newer = jnp.broadcast_to((stored >= 0) & (stored <= now), (*logits.shape[:2], 1, query.shape[3], stored.shape[-1]))
    older = jnp.repeat(keep, layout.granule, axis=2)[:, :, None, None]
    older = jnp.broadcast_to(older, (*newer.shape[:4], older.shape[-1]))
    seen = jnp.concatenate([older, newer], axis=-1)
    weight = jax.nn.softmax(jnp.where(seen, logits, jnp.finfo(jnp.float32).min), axis=-1)
    weight = jnp.where(seen, weight, 0)
    packed, recent = weight[..., : older.shape[-1]], weight[..., older.shape[-1] :]
    packed = jnp.where(member, packed[:, :, :, :, None], 0)
    out = jnp.einsum("bhgtnk,bhke->bhgtne", packed, rows(store.value), **exact)
    out = jnp.einsum("bhgtne,bhned->bhgtd", out, store.segments.basis_value, **exact)
    return (out + jnp.einsum("bhgts,bhsd->bhgtd", recent, value, **exact)).astype(query.dtype)
