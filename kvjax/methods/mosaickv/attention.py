"""Attention over MosaicKV's storage: scores of packed block means, and one softmax over packed tokens and the buffer."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerStorage
from kvjax.methods.mosaickv.store import Store, owner
from kvjax.methods.mosaickv.strategy import Layout, Packed, product
from pallas_kernels.attend.mosaickv.packed_attention import packed_attention
from pallas_kernels.formats.packed_vectors import unpack
from pallas_kernels.numerics import even_block, finite_or_zero, log_denominator, merge_pair
from pallas_kernels.query.mosaickv.project_query import project_query
from pallas_kernels.score.mosaickv.packed_score import packed_score
from pallas_kernels.soft_cap import capped

_LEAST, _PIECES = 1024, 16  # slots that are unpacked at once at least, and most pieces of them


def visible_blocks(layout: Layout, store: Store) -> Array:
    """Mark the stored blocks that can be attended to, bool [B, 1, P]."""
    return jnp.arange(store.block.values.shape[2])[None, None] < (store.packed // layout.granule)[:, None, None]


def count_blocks(layout: Layout, store: Store) -> Array:
    """Count the visible blocks in each of the N segments with bases: int32 [B, N]."""
    segment = owner(layout, store, block_slots(layout, store))
    mine = segment[..., None] == jnp.arange(store.num_segments)[None, None, None]
    return jnp.sum(mine & visible_blocks(layout, store)[..., None], axis=(1, 2), dtype=jnp.int32)


def block_slots(layout: Layout, store: Store) -> Array:
    """Return the first slot of every block, int32 [1, 1, P]."""
    return (jnp.arange(store.block.values.shape[2], dtype=jnp.int32) * layout.granule)[None, None]


def block_scores(layout: Layout, store: Store, parts: Array) -> Array:
    """Multiply queries with the packed mean of every block; a block that is not visible gets -inf.

    Args:
        layout: static sizes.

    Returns:
        float32 [B, H, P], the maximum over the G query heads.
    """
    return packed_score(
        parts,
        store.block.values,
        store.block.bitmap,
        store.packed,
        store.last,
        unit=layout.granule,
        reduce="max",
        **_owners(layout, store),
    )


def projected(store: Store, query: Array) -> Array:
    """Rotate queries [B, H, G, D], rotated by position, into the key basis of every segment; see `project_query`."""
    return project_query(query, store.segments.basis_key, dtype=store.key.values.dtype)


def attend_listed(
    layout: Layout, store: Store, cache: LayerStorage, query: Array, parts: Array, blocks: Array, count: Array
) -> Array:
    """Attend with one query per head to the buffer and to listed blocks, with kernels if there are any.

    Args:
        layout: static sizes.
        query: [B, H, G, D], rotated by position.
        blocks: int32 [B, H, K]; the first ``count`` entries are blocks, ascending.
        count: int32 [B, H].

    Returns:
        [B, H, G, D] in the dtype of the query.
    """
    return packed_attention(
        parts,
        query,
        (store.key.values, store.key.bitmap),
        (store.value.values, store.value.bitmap),
        store.segments.basis_value,
        blocks,
        count,
        store.last,
        (cache.key, cache.value, cache.position),
        scale=1 / math.sqrt(layout.dim),
        granule=layout.granule,
        **_owners(layout, store),
    )


def _owners(layout: Layout, store: Store) -> dict[str, Any]:
    """Build the arguments that tell a kernel the segment of each block."""
    table = None if store.output is None else owner(layout, store, block_slots(layout, store))[:, 0]
    return {"span": layout.segment // layout.granule, "owner": table}


def attend_packed(layout: Layout, store: Store, cache: LayerStorage, query: Array, position: Array, keep: Array) -> Array:
    """Attend to packed blocks and the buffer under one softmax.

    All stored tokens are unpacked, a piece at a time, so this function is for several tokens at once. The output is rotated
    out of the segments' bases; the cache is not.

    Args:
        layout: static sizes.
        query: [B, H, G, T, D], rotated by position.
        position: int32 [B, T].
        keep: bool [B, H, G or 1, P], blocks to attend to.

    Returns:
        [B, H, G, T, D] in the dtype of the query.
    """
    segments = jnp.arange(store.num_segments).reshape(1, 1, 1, 1, -1, 1)
    asked = query.astype(jnp.float32) / math.sqrt(layout.dim)
    in_basis = product("bhgtd,bhned->bhgtne", asked, store.segments.basis_key)
    slots = store.key.values.shape[2]

    def rows(packed: Packed, slot: Array) -> Array:
        values, bitmap = (jnp.take(x, slot, axis=2, mode="clip") for x in (packed.values, packed.bitmap))
        return unpack(values, bitmap, layout.dim).astype(jnp.float32)

    def add(part: tuple[Array, Array], slot: Array) -> tuple[tuple[Array, Array], None]:
        """Merge attention to the packed tokens in slots int32 [K] with ``part``."""
        member = owner(layout, store, slot[None, None])[:, :, None, None, None] == segments
        real = (slot < slots).reshape(1, 1, 1, 1, -1)
        seen = jnp.take(keep, slot // layout.granule, axis=3, mode="clip")[:, :, :, None] & real
        logits = product("bhgtne,bhke->bhgtnk", in_basis, rows(store.key, slot))
        weight, lse = _weights(capped(jnp.where(member, logits, 0).sum(axis=4)), seen)
        weight = jnp.where(member, weight[:, :, :, :, None], 0)
        out = product("bhgtnk,bhke->bhgtne", weight, rows(store.value, slot))
        return merge_pair(*part, product("bhgtne,bhned->bhgtd", out, store.segments.basis_value), lse), None

    held = cache.valid[..., None]
    key, value = (jnp.where(held, x, 0).astype(jnp.float32) for x in (cache.key, cache.value))
    stored, now = cache.position[:, :, None, None], position[:, None, None, :, None]
    weight, lse = _weights(capped(product("bhgtd,bhsd->bhgts", asked, key)), (stored >= 0) & (stored <= now))
    block = even_block(slots, max(_LEAST, -(-slots // _PIECES)))
    pieces = jnp.arange(-(-slots // block) * block, dtype=jnp.int32).reshape(-1, block)
    return lax.scan(add, (product("bhgts,bhsd->bhgtd", weight, value), lse), pieces)[0][0].astype(query.dtype)


def _weights(logits: Array, seen: Array) -> tuple[Array, Array]:
    """Compute a softmax over what is ``seen``: float32 [..., K], and its lse [...]; 0 and -inf where nothing is seen."""
    logits = jnp.where(seen, logits, -jnp.inf)
    shift = finite_or_zero(lax.stop_gradient(jnp.max(logits, axis=-1)))
    weight = jnp.exp(logits - shift[..., None])
    total = jnp.sum(weight, axis=-1)
    return weight / jnp.where(total > 0, total, 1)[..., None], log_denominator(shift, total)
