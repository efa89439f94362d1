"""MosaicKV: keep every token, but only the largest channels of each vector in a rotated basis; attend to the best blocks.

Stored, per KV head: for each segment of the prompt two bases R (rows: eigenvectors of the second moment of its rotated keys
and of its values); of every key, value and block mean the r largest channels in that basis and a bitmap of which they are
(`kvjax.methods.mosaickv.packing`); the newest tokens, up to ``buffer`` of them, as they are. The exact prompt is gone.

Score of block p of segment s, the best query head of the group deciding (``reduce``)::

    u[h, p] = max over g of  (Rk_s q[h, g]) . packed mean of the block's keys

A step attends to the ``ceil(fraction * blocks)`` best blocks of the row and to the buffer under one softmax; the query is
rotated into each segment's basis and the output out of it, the cache never. Prompt attention is dense and exact; several
tokens at once (`extend`) attend to all that is stored.

**Source**: "MosaicKV" (arXiv:2607.00760); no code has been released.

**Departures** (mostly silences of the paper): bases are per layer, KV head and segment, of keys after RoPE, which the
rotation of the query forces. One block list per KV head, chosen over all segments together (``per_segment``), raw scores,
maximum over the group; no block is forced (``keep_first_block``). The last ``n mod buffer`` prompt tokens wait in the buffer.
New tokens are packed as they arrive and shown when the buffer is full, which is the same as packing a full buffer and
costs the same in every step. A group of channels is scored by its squared sum. The channel permutation for neighbouring
selections is left out: how it is found is not said.

``strategy="dynamic"`` chooses kept share and element group per row, KV head and segment (fewest bytes whose mean loss is at
most ``max_loss``) and the block size (largest with intra-block variance at most ``max_variance``); the paper gives no
thresholds. Space is allocated for the highest rate and smallest block, so fewer bytes are moved, not occupied. Loss is the
share of energy pruned, mean of key and value; an output segment ends at a full buffer when its summed loss exceeds
``lifetime`` tokens at the prompt's mean loss, or at ``segment`` tokens; it is fitted on its exact copy and packed anew, at
once rather than in the background, its moments taken from that copy rather than accumulated. There is room for ten such
segments, or one per 256 new tokens announced; the one after them stays open.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerCache, LayerSpec
from kvjax.method import Cost, Inputs, LayerMethod
from kvjax.methods.mosaickv.attention import (
    attend_listed,
    attend_packed,
    block_scores,
    block_slots,
    count_blocks,
    turned,
    visible_blocks,
)
from kvjax.methods.mosaickv.store import Store, build, flush, outlived, owner, pool, refit, write
from kvjax.methods.mosaickv.strategy import BLOCKS, Layout, pick, vector_bytes
from kvjax.offload import check_offload, empty_storage
from kvjax.rope import rotate
from kvjax.selection import compact, page_slots
from kvjax.typing import EMPTY, is_concrete, pytree, static
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.host import to_host
from pallas_kernels.kth_select import kth_select
from pallas_kernels.prefix_attention import prefix_attention


@pytree
class MosaicState:
    """The raw prompt until it is finished; then the buffer of newest tokens, and everything older in ``store``."""

    cache: LayerCache
    store: Store | None = None

    @property
    def basis_key(self) -> Array:
        """Bases of the keys of each segment, float32 [B, H, N, D, D]; rows are unit vectors."""
        return self.store.segments.basis_key

    @property
    def basis_value(self) -> Array:
        """Those of the values."""
        return self.store.segments.basis_value


@pytree
class MosaicKV(LayerMethod):
    """Rotated, per-vector pruned cache with block retrieval; see the module docstring."""

    channels: float = static(0.25)  # share of channels kept (static strategy)
    fraction: float | Array = 0.10  # share of blocks attended, traced, at most `capacity`
    capacity: float | None = static(None)  # allocated selection, as a share of blocks; None = fraction
    block_size: int = static(8)  # tokens per block (static strategy)
    element_group: int = static(1)  # adjacent channels that share a bit (static strategy): 1, 2 or 4
    segment: int = static(65536)  # tokens that share a basis, at most
    buffer: int = static(32)  # newest tokens kept as they are, at most, before they are packed
    reduce: str = static("max")  # over the group's query heads: "max", "mean", "softmax" (mean of block probabilities)
    per_segment: bool = static(False)  # take the share of blocks from each segment rather than from all
    keep_first_block: bool = static(False)  # always attend to the row's first block
    truncate: bool = static(False)  # never store the last quarter of the rotated channels
    rotate: bool = static(True)  # False: prune the channels of the model's own basis
    per_vector: bool = static(True)  # False: all vectors of a segment keep the same channels
    strategy: str = static("static")  # or "dynamic": channels, element group and block size by content
    max_loss: float | Array = 0.1  # energy a segment may lose on average (dynamic strategy)
    max_variance: float | Array = 0.5  # share of key energy that may lie inside blocks (dynamic strategy)
    lifetime: float | Array = 8192.0  # tokens an output segment lasts at the prompt's mean loss (dynamic strategy)
    implementation: str | None = static(None)  # None, or "mask": unpack everything and mask blocks, the slow reference
    offload: bool | float = static(False)  # in host memory: the prompt while read, "dynamic"'s open segment; or a share

    PAPER: ClassVar[str] = "arXiv:2607.00760"

    keeps = "every token, its largest channels"
    offloadable = True

    def __post_init__(self) -> None:
        self._check_choices()
        check_offload(self)
        granule = BLOCKS[-1] if self.strategy == "dynamic" else self.block_size
        if self.block_size < 1:
            raise ValueError(f"MosaicKV: block_size must be at least 1 token, got {self.block_size}")
        if self.buffer < 2 or self.buffer % granule:
            raise ValueError(f"MosaicKV: buffer must be a multiple of a block of {granule} tokens, got {self.buffer}")
        if self.segment < 1 or self.segment % self.buffer:
            raise ValueError(f"MosaicKV: segment must be a multiple of buffer={self.buffer} tokens, got {self.segment}")
        if not 0 < self.channels <= 1:
            raise ValueError(f"MosaicKV: channels must be a share in (0, 1], got {self.channels}")
        for name in ("max_loss", "max_variance", "lifetime"):
            value = vars(self)[name]
            if is_concrete(value) and value < 0:
                raise ValueError(f"MosaicKV: {name} must not be negative, got {value}")
        if is_concrete(self.fraction):
            if not 0 < self.fraction <= 1:
                raise ValueError(f"MosaicKV: fraction must be a share in (0, 1], got {self.fraction}")
            if self.capacity is None:
                object.__setattr__(self, "capacity", float(self.fraction))
            elif self.fraction > self.capacity:
                raise ValueError(f"MosaicKV: fraction must be at most capacity={self.capacity}, got {self.fraction}")
        elif self.capacity is None:
            raise ValueError("MosaicKV: capacity (static) must be given when fraction is an array or traced")

    def _check_choices(self) -> None:
        for name, known in (
            ("element_group", (1, 2, 4)),
            ("reduce", ("max", "mean", "softmax")),
            ("strategy", ("static", "dynamic")),
            ("implementation", (None, "mask")),
        ):
            if vars(self)[name] not in known:
                raise ValueError(f"MosaicKV: {name} must be one of {known}, got {vars(self)[name]!r}")
        if self.strategy == "dynamic" and not self.per_vector:
            raise ValueError("MosaicKV: per_vector must be True under strategy='dynamic', got False")

    def init(self, spec: LayerSpec) -> MosaicState:
        self._layout(spec.head_dim)
        return MosaicState(
            cache=empty_storage(spec, spec.prompt_slots)
        )

    def attend(self, state: MosaicState, inputs: Inputs) -> tuple[Array, MosaicState]:
        if state.store is None:
            return self._prompt(state.cache, inputs)
        query, key, cache = _append(state.cache, inputs)
        layout = self._layout(query.shape[-1])
        # What is packed now is not visible yet; packing first lets it happen in place, nothing reads an older store later.
        early = inputs.position < state.store.packed[:, None] + layout.buffer
        position = jnp.where(early, inputs.position, EMPTY) if layout.dynamic else inputs.position
        store = write(layout, cache, state.store, key, inputs.value, position)
        if query.shape[3] == 1:
            out = self._decode(layout, store, cache, query[..., 0, :], inputs.position)[..., None, :]
        else:  # several tokens at once read everything
            keep = jnp.broadcast_to(visible_blocks(layout, store), store.block.values.shape[:3])
            out = attend_packed(layout, store, cache, query, inputs.position, keep)
        return out, self._close(layout, cache, store, key, inputs.value, jnp.where(early, EMPTY, inputs.position))

    def finish(self, state: MosaicState, spec: LayerSpec) -> MosaicState:
        if state.store is not None:
            return state
        cache, store = build(
            self._layout(spec.head_dim), state.cache.resident(), spec.max_new_tokens, self.max_loss, self.max_variance
        )
        if spec.offloaded and store.output is not None:
            store = store.with_exact(to_host(store.output.key), to_host(store.output.value))
        return MosaicState(cache=cache, store=store)

    def chosen(self, state: MosaicState, inputs: Inputs) -> Array:
        query, _, cache = _append(state.cache, inputs)
        layout = self._layout(query.shape[-1])
        blocks, count = self._select(layout, state.store, turned(state.store, query[..., 0, :]))
        keep = jnp.repeat(_listed(blocks, count), layout.granule, axis=2)
        return jnp.concatenate([jnp.where(keep, page_slots(blocks, layout.granule), EMPTY), cache.position], axis=2)

    def cost(self, state: MosaicState, shared: None) -> Cost:
        """Under the dynamic strategy selected rows are counted at the mean size of the row's packed tokens."""
        cache, store = state.cache, state.store
        layout, itemsize = self._layout(cache.key.shape[-1]), cache.key.dtype.itemsize
        slots = block_slots(layout, store)
        blocks = count_blocks(layout, store, owner(layout, store, slots), store.num_segments)
        quota = self._quota(blocks.sum(axis=1))
        if self.per_segment:
            quota = self._quota(count_blocks(layout, store, pool(layout, store, slots), store.num_pools)).sum(axis=1)
        selected = (quota * layout.granule).astype(jnp.float32)
        raw = 2 * layout.dim * itemsize * cache.cursor.astype(jnp.float32)
        tokens = (blocks * layout.granule).astype(jnp.float32)
        row = vector_bytes(layout, store.segments, itemsize)
        heads, counters = cache.key.shape[1], {}
        if layout.dynamic:
            scanned = (tokens[:, None] * row / store.segments.block.astype(jnp.float32)).sum(axis=2)
            mean = (tokens[:, None] * row).sum(axis=2) / jnp.maximum(tokens.sum(axis=1), 1)[:, None]
            scanned_bytes = scanned.sum(axis=1)
            packed = (scanned + selected[:, None] * 2 * mean).sum(axis=1)
            output, seen = store.output, store.packed + cache.cursor
            counters = {
                "segments": (store.last + 1 + output.fitted).astype(jnp.float32),
                "loss": output.total_loss / jnp.maximum(seen, 1).astype(jnp.float32),
            }
        else:
            scanned_bytes = heads * row * (tokens.sum(axis=1) / layout.granule)
            packed = heads * row * (tokens.sum(axis=1) / layout.granule + 2 * selected)
        attended = selected + cache.cursor.astype(jnp.float32)
        return Cost(
            attended=attended,
            kv_bytes=packed - scanned_bytes + heads * raw,
            metadata_bytes=scanned_bytes,
            counters=counters,
        )

    def room(self, state: MosaicState) -> Array:
        cache, store = state.cache, state.store
        if store is None:
            return cache.num_slots - cache.cursor
        slots = store.key.values.shape[2]
        if store.output is not None:
            slots = jnp.minimum(slots, store.prompt + store.output.key.shape[2])
        return slots - store.packed - cache.cursor

    def max_tokens(self, in_prompt: bool) -> int | None:
        return None if in_prompt else self.buffer

    def _layout(self, dim: int) -> Layout:
        dynamic = self.strategy == "dynamic"
        group = 1 if dynamic else self.element_group
        rank = 3 * dim // 8 if dynamic else round(self.channels * dim)
        channels = 3 * dim // 4 if self.truncate else dim
        if dim % 8:
            raise ValueError(f"MosaicKV: head_dim must be a multiple of 8, got {dim}")
        if not 1 <= rank <= channels or rank % group or channels % group:
            raise ValueError(
                f"MosaicKV: channels must leave a multiple of element_group={group} from 1 to {channels} of "
                f"head_dim={dim}, got {rank} (channels={self.channels})"
            )
        return Layout(
            dim=dim,
            rank=rank,
            channels=channels,
            element_group=group,
            granule=BLOCKS[0] if dynamic else self.block_size,
            window=BLOCKS[-1] if dynamic else self.block_size,
            buffer=self.buffer,
            segment=self.segment,
            dynamic=dynamic,
            rotate=self.rotate,
            per_vector=self.per_vector,
        )

    def _quota(self, blocks: Array) -> Array:
        """Blocks attended out of ``blocks`` int32: the share, rounded up, at least one if there is any."""
        share = jnp.asarray(self.fraction, jnp.float32) * blocks.astype(jnp.float32)
        return jnp.clip(jnp.ceil(share - 1e-6).astype(jnp.int32), jnp.minimum(blocks, 1), blocks)

    def _first_block(self, layout: Layout, store: Store) -> int | Array:
        """Tokens of the row's first block; int32 [B, H, 1] under the dynamic strategy."""
        if not layout.dynamic:
            return layout.granule
        first = owner(layout, store, jnp.zeros((store.packed.shape[0], 1, 1), jnp.int32))[:, 0, 0]
        return pick(store.segments, first).block[..., None]

    def _prompt(self, cache: LayerCache, inputs: Inputs) -> tuple[Array, MosaicState]:
        """A piece of the prompt: dense and exact."""
        query, key = _rotated(inputs)
        cache = cache.append(key, inputs.value, inputs.position, inputs.start)
        if isinstance(inputs.start, int):  # no earlier piece
            return causal_attention(query, key, inputs.value), MosaicState(cache=cache)
        read = cache.resident()
        out, _ = prefix_attention(
            query,
            read.key,
            read.value,
            start=inputs.start,
            length=jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32),
            scale=1 / math.sqrt(query.shape[-1]),
        )
        return out, MosaicState(cache=cache)

    def _decode(self, layout: Layout, store: Store, cache: LayerCache, query: Array, position: Array) -> Array:
        """One rotated query [B, H, G, D] per head: the best blocks and the buffer."""
        parts = turned(store, query)
        blocks, count = self._select(layout, store, parts)
        if self.implementation != "mask":
            return attend_listed(layout, store, cache, query, parts, blocks, count)
        keep = _spread(blocks, _listed(blocks, count), store.block.values.shape[2])
        return attend_packed(layout, store, cache, query[..., None, :], position, keep)[..., 0, :]

    def _select(self, layout: Layout, store: Store, parts: Array) -> tuple[Array, Array]:
        """Blocks for queries that are `turned`: int32 [B, H, K], ascending, and how many are listed, int32 [B, H]."""
        if self.reduce == "softmax":
            logits = block_scores(layout, store, parts, None) / math.sqrt(layout.dim)
            peak = jnp.maximum(logits.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)
            score = jax.nn.softmax(logits - peak, axis=-1).mean(axis=2)
            score = jnp.where(visible_blocks(layout, store), score, -jnp.inf)
        else:
            score = block_scores(layout, store, parts, self.reduce)
        if self.keep_first_block:
            first = block_slots(layout, store) < self._first_block(layout, store)
            score = jnp.where(first & (score > -jnp.inf), jnp.inf, score)
        blocks = score.shape[2]
        capacity = min(max(1, math.ceil(self.capacity * blocks - 1e-6)), blocks)
        if not self.per_segment:
            quota = self._quota(jnp.minimum(store.packed // layout.granule, blocks))
            return kth_select(score, quota[:, None], capacity)
        # A block is in if fewer blocks of its own segment than the quota come before it.
        segments = store.num_pools
        order = jnp.argsort(-score, axis=-1, stable=True)
        segment = pool(layout, store, block_slots(layout, store))
        quota = self._quota(count_blocks(layout, store, segment, segments))[:, None, None]
        sorted_segment = jnp.take_along_axis(jnp.broadcast_to(segment, score.shape), order, axis=2)
        member = sorted_segment[..., None] == jnp.arange(segments)[None, None, None]
        inside = (member & (jnp.cumsum(member.astype(jnp.int32), axis=2) <= quota)).any(axis=-1)
        inside = jnp.take_along_axis(inside, jnp.argsort(order, axis=-1), axis=2) & visible_blocks(layout, store)
        listed, keep = compact(inside, min(capacity + segments, blocks))
        return listed, jnp.sum(keep, axis=2, dtype=jnp.int32)

    def _close(
        self, layout: Layout, cache: LayerCache, store: Store, key: Array, value: Array, late: Array
    ) -> MosaicState:
        """After attention: show and drop a full buffer's tokens; ``late`` int32 [B, T] are those not packed yet."""
        cache, store, full = flush(layout, cache, store, late.shape[1])
        if not layout.dynamic:
            return MosaicState(cache=cache, store=store)
        ended = full & outlived(layout, store, jnp.asarray(self.lifetime, jnp.float32))
        # The exact copy is read and not changed: passed through a conditional it would be copied.
        exact = store.output
        store = lax.cond(
            ended.any(),
            lambda: refit(layout, store, ended, self.max_loss, self.max_variance).with_exact(None, None),
            lambda: store.with_exact(None, None),
        ).with_exact(exact.key, exact.value)
        if late.shape[1] > 1:
            # Tokens behind a full buffer are packed after it has closed, since a new segment may begin with them.
            store = write(layout, cache, store, key, value, late)
        return MosaicState(cache=cache, store=store)


def _append(cache: LayerCache, inputs: Inputs) -> tuple[Array, Array, LayerCache]:
    """Rotated query [B, H, G, T, D] and key [B, H, T, D], and the buffer with the new tokens."""
    if inputs.query.shape[3] > 1:
        query, key = _rotated(inputs)
        return query, key, cache.append(key, inputs.value, inputs.position)
    query, cache = cache.append_rotated(inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq)
    return query, rotate(inputs.key, inputs.position[:, None], inputs.inv_freq), cache


def _rotated(inputs: Inputs) -> tuple[Array, Array]:
    """Query and key rotated at their positions."""
    return (
        rotate(inputs.query, inputs.position[:, None, None], inputs.inv_freq),
        rotate(inputs.key, inputs.position[:, None], inputs.inv_freq),
    )


def _listed(blocks: Array, count: Array) -> Array:
    """Which entries of lists int32 [B, H, K] are listed: bool [B, H, K]."""
    return jnp.arange(blocks.shape[2])[None, None] < count[..., None]


def _spread(chosen: Array, keep: Array, blocks: int) -> Array:
    """A list of blocks [B, H, K] as a mask bool [B, H, blocks]."""
    row, head = jnp.arange(keep.shape[0])[:, None, None], jnp.arange(keep.shape[1])[None, :, None]
    return jnp.zeros((*keep.shape[:2], blocks), bool).at[row, head, chosen].max(keep)
