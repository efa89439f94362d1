"""MosaicKV: keep every token, but only the largest channels of each vector in a rotated basis; attend to the best blocks.

Stored per KV head: two bases R for each segment of the prompt, whose rows are the eigenvectors of the second moment of the
segment's rotated keys and of its values; for every key, value and block mean the r largest channels in that basis and a
bitmap of their numbers (`pallas_kernels.formats.packed_vectors`); up to ``buffer`` of the newest tokens, unchanged. The
exact prompt is not kept.

Score of block p of segment s for KV head h::

    u[h, p] = max over g of  (Rk_s q[h, g]) . packed mean of the block's keys

A step attends to the ``ceil(fraction * blocks)`` best blocks of the row and to the buffer under one softmax. The query is
rotated into each segment's basis, and the output out of it; the cache is not rotated. Prompt attention is dense and exact.
Several tokens at once (`extend`) attend to all stored tokens.

**Source**: "MosaicKV" (arXiv:2607.00760); no code has been released.

**Departures** (most of them because the paper does not say): there are bases for each layer, KV head and segment. They are
of keys after RoPE, because the query is rotated into them, and of uncentred moments (the paper gives K^T K and also says
covariance). The last ``n mod buffer`` prompt tokens wait in the buffer. New tokens are packed when they arrive and become
visible when the buffer is full; this equals packing a full buffer, and costs the same in every step. Under the static
strategy each channel has its own bit, because the paper does not say its element group; under the dynamic one adjacent
channels can share a bit, and their score is their squared sum. The channel permutation for neighbouring selections is left
out, because the paper does not say how to compute it. No layer is dense; the paper does not say, and Quest, its baseline,
leaves two layers dense (`kvjax.wrappers.PerLayer` can).

Each KV head has one list of blocks from all segments together, by the maximum over its group; no block is always attended,
and every rotated channel can be kept. What other readings score: docs/notebook/readings-others.md.

``strategy="dynamic"`` chooses three sizes per row, KV head and segment. The kept share and the element group need the fewest
bytes with a mean loss of at most ``max_loss``; the block is the largest with a variance inside blocks of at most
``max_variance``. The paper gives no thresholds. Space is allocated for the highest rate and the smallest block, so fewer
bytes are read, but not fewer allocated. The loss is the pruned share of energy, averaged over key and value. An output
segment ends when the buffer is full and its summed loss exceeds ``lifetime`` times the prompt's mean loss of a token, or at
``segment`` tokens. Then it is fitted on its exact copy and packed again: at once, not in the background, and with moments
computed from the copy, not accumulated. There is room for ten such segments, or for one per 256 new tokens if that is more.
The next segment stays open.
"""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerSpec, LayerStorage
from kvjax.cache.offload import empty_storage
from kvjax.methods.mosaickv.attention import (
    attend_listed,
    attend_packed,
    block_scores,
    count_blocks,
    projected,
    visible_blocks,
)
from kvjax.methods.mosaickv.store import Store, build, flush, outlived, refit, write
from kvjax.methods.mosaickv.strategy import BLOCKS, Layout, vector_bytes
from kvjax.protocol.method import Cost, Inputs, LayerMethod
from kvjax.protocol.typing import EMPTY, not_none, pytree, static, traced
from kvjax.rope import rotate
from kvjax.selection import page_slots
from pallas_kernels.attend.causal_attention import causal_attention
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.choose.kth_select import kth_select
from pallas_kernels.host import to_host


@pytree
class MosaicState:
    """The raw prompt until its end; afterwards a buffer of the newest tokens, and all older tokens in ``store``."""

    cache: LayerStorage
    store: Store | None = None


@pytree
class MosaicKV(LayerMethod):
    """A rotated cache, pruned per vector, with retrieval of blocks; see the module docstring."""

    channels: float = static("share of channels to keep (static strategy)", default=0.25, above=0, most=1)
    fraction: float | Array = traced("share of blocks to attend to", default=0.10, above=0, most=1, within="capacity")
    capacity: float = static("share of blocks to make room for; None = fraction", default=None, above=0, most=1)
    block_size: int = static("tokens per block (static strategy)", default=8, least=1)
    buffer: int = static("most newest tokens that are kept unchanged", default=32, least=2)
    strategy: str = static(
        'or "dynamic": channels, element group and block size depend on the content',
        default="static",
        choices=("static", "dynamic"),
    )
    max_loss: float | Array = traced(
        "largest mean share of energy that a segment can lose (dynamic strategy)", default=0.1, least=0
    )
    offload: bool | float = static(
        'prompt while read, "dynamic"\'s open segment in host memory; or a share', default=False, least=0, most=1
    )

    PAPER: ClassVar[str] = "arXiv:2607.00760"
    lifetime = 8192.0  # tokens of an output segment that has the prompt's mean loss (dynamic strategy)
    max_variance = 0.5  # largest share of key energy inside blocks (dynamic strategy)
    segment = 65536  # most tokens that share a basis

    keeps = "every token, its largest channels"
    lacks = ("sinks", "codes", "latent")
    dense_prompt = True

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        return {"channels": 0.25, "fraction": 0.10, "strategy": "static"}, ""

    def check(self) -> None:
        granule = BLOCKS[-1] if self.strategy == "dynamic" else self.block_size
        if self.buffer % granule:
            raise ValueError(f"MosaicKV: buffer must be a multiple of a block of {granule} tokens, got {self.buffer}")
        if self.segment % self.buffer:
            raise ValueError(f"MosaicKV: segment must be a multiple of buffer={self.buffer} tokens, got {self.segment}")

    def init(self, spec: LayerSpec) -> MosaicState:
        self._layout(spec.head_dim)
        return MosaicState(cache=empty_storage(spec, spec.prompt_slots))

    def attend(self, state: MosaicState, inputs: Inputs) -> tuple[Array, MosaicState]:
        if state.store is None:
            return self._prompt(state.cache, inputs)
        query, cache = inputs.append_to(state.cache)
        key = rotate(inputs.key, inputs.position[:, None], inputs.inv_freq)
        layout = self._layout(query.shape[-1])
        # Tokens packed now are not visible yet. They are packed before attention, so that nothing reads the old store later
        # and the new store can be written in place.
        early = inputs.position < state.store.packed[:, None] + layout.buffer
        position = jnp.where(early, inputs.position, EMPTY) if layout.dynamic else inputs.position
        store = write(layout, cache, state.store, key, inputs.value, position)
        if query.shape[3] == 1:
            parts = projected(store, query[..., 0, :])
            out = attend_listed(layout, store, cache, query[..., 0, :], parts, *self._select(layout, store, parts))[
                ..., None, :
            ]
        else:  # several tokens at once attend to all stored tokens
            keep = jnp.broadcast_to(visible_blocks(layout, store), store.block.values.shape[:3])
            out = attend_packed(layout, store, cache, query, inputs.position, keep[:, :, None])
        late = jnp.where(early, EMPTY, inputs.position)
        return out, self._close(layout, cache, store, key, inputs.value, late)

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
        query, cache = inputs.append_to(state.cache)
        layout = self._layout(query.shape[-1])
        store = not_none("store", state.store)
        blocks, count = self._select(layout, store, projected(store, query[..., 0, :]))
        listed = _listed(blocks, count)
        keep = jnp.repeat(listed, layout.granule, axis=2)
        return jnp.concatenate([jnp.where(keep, page_slots(blocks, layout.granule), EMPTY), cache.position], axis=2)

    def cost(self, state: MosaicState, shared: None) -> Cost:
        """Count the bytes; under the dynamic strategy a selected token has the mean size of the row's packed tokens."""
        cache, store = state.cache, not_none("store", state.store)
        layout, itemsize = self._layout(cache.key.shape[-1]), cache.key.dtype.itemsize
        blocks = count_blocks(layout, store)
        selected = self._quota(blocks.sum(axis=1)).astype(jnp.float32) * layout.granule
        raw = 2 * layout.dim * itemsize * cache.cursor.astype(jnp.float32)
        tokens = (blocks * layout.granule).astype(jnp.float32)
        row = vector_bytes(layout, store.segments, itemsize)
        heads, counters = cache.key.shape[1], {}
        if layout.dynamic:
            scanned = (tokens[:, None] * row / store.segments.block_size.astype(jnp.float32)).sum(axis=2)
            mean = (tokens[:, None] * row).sum(axis=2) / jnp.maximum(tokens.sum(axis=1), 1)[:, None]
            scanned_bytes = scanned.sum(axis=1)
            packed = (scanned + selected[:, None] * 2 * mean).sum(axis=1)
            output, seen = not_none("output", store.output), store.packed + cache.cursor
            counters = {
                "segments": (store.last + 1 + output.fitted).astype(jnp.float32),
                "loss": output.total_loss / jnp.maximum(seen, 1).astype(jnp.float32),
            }
        else:
            scanned_bytes = heads * row * (tokens.sum(axis=1) / layout.granule)
            packed = heads * row * (tokens.sum(axis=1) / layout.granule + 2 * selected)
        attended = selected + cache.cursor.astype(jnp.float32)
        return Cost(
            attended=attended, kv_bytes=packed - scanned_bytes + heads * raw, metadata_bytes=scanned_bytes, counters=counters
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
        rank = 3 * dim // 8 if dynamic else round(self.channels * dim)
        if dim % 8:
            raise ValueError(f"MosaicKV: head_dim must be a multiple of 8, got {dim}")
        if not 1 <= rank <= dim:
            raise ValueError(
                f"MosaicKV: channels must leave 1 to {dim} of head_dim={dim}, got {rank} (channels={self.channels})"
            )
        return Layout(
            dim=dim,
            rank=rank,
            granule=BLOCKS[0] if dynamic else self.block_size,
            window=BLOCKS[-1] if dynamic else self.block_size,
            buffer=self.buffer,
            segment=self.segment,
            dynamic=dynamic,
        )

    def _quota(self, blocks: Array) -> Array:
        """Compute how many of ``blocks`` int32 to attend to: the share, rounded up, and at least 1 of any."""
        share = jnp.asarray(self.fraction, jnp.float32) * blocks.astype(jnp.float32)
        return jnp.clip(jnp.ceil(share - 1e-6).astype(jnp.int32), jnp.minimum(blocks, 1), blocks)

    def _prompt(self, cache: LayerStorage, inputs: Inputs) -> tuple[Array, MosaicState]:
        """Prefill a chunk with dense and exact attention."""
        query, key = inputs.rotated()
        cache = cache.append(key, inputs.value, inputs.position, inputs.start)
        if isinstance(inputs.start, int):  # no earlier chunk
            return causal_attention(query, key, inputs.value), MosaicState(cache=cache)
        read = cache.resident()
        out, _ = prefix_attention(
            query,
            read.key,
            read.value,
            start=not_none("start", inputs.start),
            length=jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32),
            scale=1 / math.sqrt(query.shape[-1]),
        )
        return out, MosaicState(cache=cache)

    def _select(self, layout: Layout, store: Store, parts: Array) -> tuple[Array, Array]:
        """Select the best blocks for queries ``parts`` from `projected`.

        Returns:
            Blocks int32 [B, H, K], ascending, and the number of listed entries int32 [B, H].
        """
        score = block_scores(layout, store, parts)
        blocks = score.shape[-1]
        capacity = min(max(1, math.ceil(self.capacity * blocks - 1e-6)), blocks)
        quota = self._quota(jnp.minimum(store.packed // layout.granule, blocks))
        return kth_select(score, jnp.broadcast_to(quota[:, None], score.shape[:2]), capacity)

    def _close(self, layout: Layout, cache: LayerStorage, store: Store, key: Array, value: Array, late: Array) -> MosaicState:
        """Make the tokens of a full buffer visible and remove them from it; ``late`` int32 [B, T] are not packed yet."""
        cache, store, full = flush(layout, cache, store, late.shape[1])
        if not layout.dynamic:
            return MosaicState(cache=cache, store=store)
        ended = full & outlived(layout, store, jnp.asarray(self.lifetime, jnp.float32))
        # The exact copy does not change, so it does not pass through the conditional, which would copy it.
        exact = not_none("output", store.output)
        store = lax.cond(
            ended.any(),
            lambda: refit(layout, store, ended, self.max_loss, self.max_variance).with_exact(None, None),
            lambda: store.with_exact(None, None),
        ).with_exact(exact.key, exact.value)
        if late.shape[1] > 1:
            # Tokens behind a full buffer are packed last, because a new segment can begin with them.
            store = write(layout, cache, store, key, value, late)
        return MosaicState(cache=cache, store=store)


def _listed(blocks: Array, count: Array) -> Array:
    """Mark the listed entries of ``blocks`` int32 [..., K], ``count`` int32 [...] of them: bool [..., K]."""
    return jnp.arange(blocks.shape[-1]).reshape((1,) * count.ndim + (-1,)) < count[..., None]
