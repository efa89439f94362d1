"""ShadowKV: keys of low rank on the device and values in host memory; attend to the chunks with the best mean keys.

Stored of the prompt's n tokens, where a chunk is ``chunk_size`` tokens: the keys of all KV heads side by side **before**
RoPE as a product of two matrices of rank R = ``rank``, A [n, R], which all heads share, and B [R, D] of each head; the mean
rotated key of each chunk, its landmark; all values, in host memory with ``offload=True``. Keys and values are also stored
unchanged for three kinds of tokens. These are the last ``local_chunks`` chunks and the incomplete one behind them; of the
earlier chunks, per KV head, the ``outlier_chunks`` whose landmark stands worst for some key (the smallest cosine); and all
later tokens.

Score of chunk c, which is no outlier and not at the end of the prompt, with landmark m::

    s[h, c] = max over g of  softmax over c of ( q[h, g] . m[h, c] / sqrt(D) )

A step attends to what is stored unchanged, and to the ``budget / chunk_size`` best chunks of each KV head: their keys are
A B, rotated at their own positions, and their values are fetched. Prompt attention is dense and exact. Several tokens at
once (`extend`) attend to all stored tokens.

**Source**: Sun et al., "ShadowKV: KV Cache in Shadows for High-Throughput Long-Context LLM Inference" (arXiv:2410.21465);
bytedance/ShadowKV a21f5a9 for all sizes, what is kept unchanged, and the score.

**Departures**: the code refuses a prompt of fewer tokens than the budget; here a row with few chunks attends to all of them.
Its second version keeps 24 outliers per 1024 tokens of the budget, and up to 7 more chunks at the end. Scores are float32;
the code rounds the softmax to bfloat16, where small shares are equal. It always divides by sqrt(128). The singular vectors
come from the second moment of the keys, and belong to B; in the code the singular values belong to it, and the product is
the same. The code fetches only chunks that the step before had not chosen; here each step fetches its chunks, and on a GPU
no kernel does so yet. Where a mesh divides the KV heads, each device has all of A, because the heads share it.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import attend_all, attend_slots, attend_whole
from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerCache, LayerSpec, LayerStorage
from kvjax.cache.offload import empty_storage
from kvjax.methods.budgets import SHARE
from kvjax.methods.shadowkv.landmarks import landmarks
from kvjax.methods.shadowkv.low_rank import factorize
from kvjax.protocol.method import Cost, Inputs, LayerMethod
from kvjax.protocol.slots import check_budget
from kvjax.protocol.typing import EMPTY, not_none, pytree, static, traced
from kvjax.rope import rotate
from kvjax.selection import page_slots
from pallas_kernels.attend.dense_attention import dense_attention
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.attend.shadowkv.low_rank_attention import low_rank_attention, rebuild
from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.host import on_host, to_device, to_host
from pallas_kernels.numerics import merge_pair
from pallas_kernels.score.page_logits import page_logits


@pytree
class Shadow:
    """The compressed tokens of the prompt: N slots, P chunks. The token in slot i stands at position i."""

    left: Array  # [B, N, R], see `kvjax.methods.shadowkv.low_rank`
    right: Array  # [B, H, R, D]
    landmark: Array  # [B, H, P, D], mean rotated key of each chunk
    open: Array  # bool [B, H, P], chunks that can be chosen
    chunks: Array  # int32 [B], chunks before the end of the prompt, outliers too
    value: Array  # [B, H, N, D], in host memory if the layer is offloaded


@pytree
class ShadowState:
    """The prompt with keys before RoPE until its end; afterwards the tokens that are stored unchanged, rotated."""

    cache: LayerStorage
    inv_freq: Array | None = None  # float32 [B, D/2], until the prompt's end
    shadow: Shadow | None = None


@pytree
class ShadowKV(LayerMethod):
    """Keys of low rank, landmarks and outliers; see the module docstring."""

    budget: int | Array = traced("tokens chosen per KV head, in whole chunks", default=2048, least=1, within="capacity")
    capacity: int = static("tokens allocated for them; None = budget", default=None, least=1)
    chunk_size: int = static("tokens that are chosen together", default=8, least=1)
    rank: int = static("of the keys of all KV heads together", default=160, least=1)
    outlier_chunks: int = static("chunks kept unchanged because their mean says little about them", default=48, least=1)
    local_chunks: int = static("last chunks of the prompt, kept unchanged", default=4, least=0)
    offload: bool | float = static("values in host memory, or a share of the layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2410.21465"

    keeps = "every token, keys of low rank"
    lacks = ("codes", "latent")
    dense_prompt = True

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        total, share = length // SHARE, min(1.0, length // SHARE / 2 / ((48 + 4) * 8))
        outliers, local = max(int(48 * share), 1), max(int(4 * share), 1)
        note = f"1/{SHARE} of the context, outliers and the end of the prompt too"
        return {"outlier_chunks": outliers, "local_chunks": local, "budget": total - (outliers + local) * 8}, note

    def check(self) -> None:
        check_budget(self, self.chunk_size, f"one chunk of chunk_size={self.chunk_size}")

    def init(self, spec: LayerSpec) -> ShadowState:
        return ShadowState(
            cache=empty_storage(spec, spec.prompt_slots), inv_freq=jnp.zeros((spec.batch, spec.head_dim // 2), jnp.float32)
        )

    def attend(self, state: ShadowState, inputs: Inputs) -> tuple[Array, ShadowState]:
        if state.shadow is None:
            return self._read(state, inputs)
        if inputs.query.shape[3] > 1:
            return self._attend_to_all(state, state.shadow, inputs)
        query, cache = inputs.append_to(state.cache)
        query, shadow = query[..., 0, :], state.shadow
        chunks, listed = self._chosen(shadow, query)
        near, near_lse = attend_slots(query, cache, parts=True)
        out, lse = low_rank_attention(
            query, shadow.left, shadow.right, shadow.value, chunks, listed, page_size=self.chunk_size,
            inv_freq=jnp.asarray(inputs.inv_freq), scale=1 / math.sqrt(query.shape[-1]), partials=(near, near_lse),
        )  # fmt: skip
        return with_sinks(out, lse, inputs.sinks)[0][..., None, :], dataclasses.replace(state, cache=cache)

    def finish(self, state: ShadowState, spec: LayerSpec) -> ShadowState:
        if state.shadow is not None:
            return state
        raw, size = state.cache.resident(), self.chunk_size
        inv_freq = not_none("inv_freq", state.inv_freq)[0]
        if (missing := size - raw.num_slots) > 0:
            every = jnp.arange(raw.num_slots, dtype=jnp.int32)[None, None]
            raw = raw.compact(jnp.broadcast_to(every, raw.position.shape), raw.valid, missing)
        chunks = jnp.maximum(raw.cursor // size - self.local_chunks, 0)
        landmark, worst = landmarks(raw.key, raw.num_slots // size, size, inv_freq)
        inside = (jnp.arange(worst.shape[2], dtype=jnp.int32)[None] < chunks[:, None])[:, None]
        order = jnp.where(inside, -worst, -jnp.inf)
        outliers, found = kth_select_mask(order, self.outlier_chunks, min(self.outlier_chunks, worst.shape[2]))
        b, h = jnp.arange(len(worst))[:, None, None], jnp.arange(worst.shape[1])[None, :, None]
        inside = jnp.broadcast_to(inside, worst.shape)
        count = worst.shape[2] * size
        left, right = factorize(raw.key, raw.cursor, self.rank)
        value = raw.value[:, :, :count]
        shadow = Shadow(
            left=left[:, :count],
            right=right,
            landmark=jnp.where(inside[..., None], landmark, 0),
            open=inside & ~jnp.zeros(inside.shape, bool).at[b, h, outliers].max(found),
            chunks=chunks,
            value=to_host(value) if spec.offloaded else value,
        )
        cache = self._unchanged(raw, outliers, found, chunks, spec.max_new_tokens)
        key = rotate(cache.key, jnp.maximum(cache.position, 0), inv_freq)
        return ShadowState(cache=dataclasses.replace(cache, key=key), shadow=shadow)

    def chosen(self, state: ShadowState, inputs: Inputs) -> Array:
        query, cache = inputs.append_to(state.cache)
        chunks, listed = self._chosen(not_none("shadow", state.shadow), query[..., 0, :])
        slots, listed = page_slots(chunks, self.chunk_size), jnp.repeat(listed, self.chunk_size, axis=2)
        return jnp.concatenate([cache.position, jnp.where(listed, slots, EMPTY)], axis=2)

    def cost(self, state: ShadowState, shared: None) -> Cost:
        """Count keys of low rank by their factors: a row of A for each token and head, and B once for each head."""
        shadow, item = not_none("shadow", state.shadow), state.cache.key.dtype.itemsize
        rank, dim = shadow.right.shape[2:]
        unchanged = jnp.sum(state.cache.valid, axis=2, dtype=jnp.float32)
        candidates = jnp.sum(shadow.open, axis=2, dtype=jnp.int32)
        found = (jnp.minimum(candidates, self.budget // self.chunk_size) * self.chunk_size).astype(jnp.float32)
        fetched = found * (dim * item)
        scanned = shadow.chunks.astype(jnp.float32) * (shadow.right.shape[1] * (dim * item + 1))
        kv_bytes = unchanged * (2 * dim * item) + fetched + found * (rank * item) + jnp.float32(rank * dim * item)
        return Cost(
            attended=(unchanged + found).mean(axis=1),
            kv_bytes=kv_bytes.sum(axis=1),
            metadata_bytes=scanned,
            bus_bytes=fetched.sum(axis=1) if on_host(shadow.value) else jnp.zeros_like(scanned),
            counters={},
        )

    def _read(self, state: ShadowState, inputs: Inputs) -> tuple[Array, ShadowState]:
        """Prefill a chunk with dense and exact attention."""
        query, key = inputs.rotated()
        cache = state.cache.append(inputs.key, inputs.value, inputs.position, inputs.start)
        inv_freq = jnp.broadcast_to(inputs.inv_freq[None], not_none("inv_freq", state.inv_freq).shape)
        state = ShadowState(cache=cache, inv_freq=inv_freq)
        if isinstance(inputs.start, int):  # no earlier chunk
            return attend_whole(query, key, inputs.value, inputs.position, inputs.sinks), state
        read = cache.resident()
        out, lse = prefix_attention(
            query,
            rotate(read.key, jnp.arange(read.num_slots, dtype=jnp.int32)[None, None], inputs.inv_freq),
            read.value,
            start=not_none("start", inputs.start),
            length=jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32),
            scale=1 / math.sqrt(query.shape[-1]),
        )
        return with_sinks(out, lse, inputs.sinks)[0], state

    def _attend_to_all(self, state: ShadowState, shadow: Shadow, inputs: Inputs) -> tuple[Array, ShadowState]:
        """Attend with several tokens after the prompt, rebuilding the keys of all chunks."""
        query, key = inputs.rotated()
        cache = state.cache.append(key, inputs.value, inputs.position)
        value = to_device(shadow.value)
        slots = jnp.broadcast_to(jnp.arange(value.shape[2], dtype=jnp.int32)[None, None], value.shape[:3])
        far = dense_attention(
            query,
            rebuild(shadow.left, shadow.right, slots, inputs.inv_freq),
            value,
            query_position=inputs.position,
            key_position=jnp.where(jnp.repeat(shadow.open, self.chunk_size, axis=2), slots, EMPTY),
            scale=1 / math.sqrt(query.shape[-1]),
        )
        both = merge_pair(*attend_all(query, cache, inputs.position), *far)
        return with_sinks(*both, inputs.sinks)[0], dataclasses.replace(state, cache=cache)

    def _chosen(self, shadow: Shadow, query: Array) -> tuple[Array, Array]:
        """Select the best chunks for the rotated query [B, H, G, D]: int32 and whether each is listed, [B, H, K]."""
        scale = 1 / math.sqrt(query.shape[-1])
        logits, lse = page_logits(query, shadow.landmark, shadow.chunks, scale=scale, held=shadow.open)
        most = min(self.capacity // self.chunk_size, logits.shape[3])
        return kth_select_mask(logits, self.budget // self.chunk_size, most, lse=lse)

    def _unchanged(self, raw: LayerCache, outliers: Array, found: Array, chunks: Array, room: int) -> LayerCache:
        """Gather the outliers' tokens, the tokens behind the last of ``chunks`` int32 [B], and ``room`` free slots."""
        size = self.chunk_size
        ends = min((self.local_chunks + 1) * size - 1, raw.num_slots)
        last = chunks[:, None] * size + jnp.arange(ends, dtype=jnp.int32)[None]
        shape = (*outliers.shape[:2], ends)
        keep = jnp.broadcast_to((last < raw.cursor[:, None])[:, None], shape)
        last = jnp.broadcast_to(jnp.minimum(last, raw.num_slots - 1)[:, None], shape)
        slots = jnp.concatenate([page_slots(outliers, size), last], axis=2)
        keep = jnp.concatenate([jnp.repeat(found, size, axis=2), keep], axis=2)
        cursor = outliers.shape[2] * size + raw.cursor - chunks * size
        # A row with few outliers has empty slots before its other tokens.
        return dataclasses.replace(raw.compact(slots, keep, room), cursor=cursor)
