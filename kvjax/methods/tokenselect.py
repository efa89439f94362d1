"""TokenSelect: one token set per layer by a soft vote of all heads, attended with positions re-numbered without a gap.

Stored: all keys **before** RoPE, all values, and the last query that selected with what it selected. For a chunk of queries
(one, when decoding) with N tokens stored, candidates are the tokens t between the ``num_sink`` first and the ``num_local``
newest::

    qbar[h] = mean over the chunk's queries i of rope(q[i, h], num_local + i)
    vote[t] = sum over all query heads h of  softmax over t of ( qbar[h] . k[t] )        no 1/sqrt(D)

The ``budget`` most voted tokens, in order, stand between sinks and local tokens; the key in slot j is rotated at j and the
queries at the last slots, so no position beyond ``num_sink + budget + num_local`` ever occurs and contexts may exceed the
trained length. Up to that many tokens attention is dense. The prompt is read this way too, ``chunk`` tokens at a time. A
decode step whose query has a cosine of at least ``theta`` with the query that last selected reuses its selection.

**Source**: Wu et al., "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic
Token-Level KV Cache Selection" (arXiv:2411.02886, sections 4 and 5, table 4); pzs19/TokenSelect 8e1e97f for sinks, chunk and
the rotation of scoring queries.

**Departures**: scoring pairs a query head with the KV head it attends to, where paper and code take ``head mod num_kv_heads``
(``gqa_map="mod"`` does). Votes are float32, not bfloat16. Selections are reused while decoding as the paper says; the code
ships with that switched off (``theta=2`` never reuses). Votes are not pooled unless ``kernel`` says so: the code picks a
width per dataset, and an even width here keeps the length of the vote. Several tokens after the prompt (`extend`) select as
a chunk does and end the reuse.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerCache, empty_layer
from kvjax.families import check_budget
from kvjax.method import Cost, Inputs, LayerMethod, LayerSpec, free_slots
from kvjax.rope import rotate
from kvjax.selection import smooth
from kvjax.typing import EMPTY, pytree, static
from pallas_kernels.dense_attention import dense_attention


@pytree
class TokenState:
    """Un-rotated storage and the selection cache."""

    cache: LayerCache
    query: Array  # float32 [B, H, G, D], un-rotated, the query that last selected
    chosen: Array  # int32 [B, K], what it selected, ascending
    ready: Array  # bool [B], whether there is such a selection
    hits: Array  # int32 [B], decode steps that reused it
    refreshes: Array  # int32 [B], decode steps that selected


@pytree
class Slots:
    """Tokens to attend, the same for all heads."""

    token: Array  # int32 [B, K]
    place: Array  # int32 [B, K], the slot, which is the position keys are rotated at; EMPTY where there is no token
    count: Array  # int32 [B], slots in use


@pytree
class TokenSelect(LayerMethod):
    """Token-level selection by head soft vote; see the module docstring."""

    budget: int | Array = 2048  # tokens selected besides sinks and local ones, traced, at most `capacity`
    capacity: int | None = static(None)  # allocated for them; None = budget
    num_sink: int = static(128)  # first tokens, always attended
    num_local: int = static(512)  # newest tokens, always attended; the prompt chunk is among them
    chunk: int = static(512)  # prompt tokens that share one selection, at most num_local
    theta: float | Array = 0.9  # cosine from which a decode step reuses the last selection, traced; above 1: never
    vote: str = static("soft")  # "soft", "hard" (each head votes for its own best tokens) or "raw" (sum of logits)
    kernel: int = static(1)  # max-pooling window over votes, in tokens; 1 = none
    gqa_map: str = static("group")  # KV head a query head scores with: "group" (its own) or "mod" (the paper's kernel)
    implementation: str | None = static(None)  # None, or "mask": attention over every slot with a mask

    PAPER: ClassVar[str] = "arXiv:2411.02886"

    extrapolates = True

    def __post_init__(self) -> None:
        if self.num_sink < 0 or self.kernel < 1:
            raise ValueError(
                f"TokenSelect: num_sink must be at least 0 and kernel at least 1, got {self.num_sink} and {self.kernel}"
            )
        if not 1 <= self.chunk <= self.num_local:
            raise ValueError(
                f"TokenSelect: chunk must lie between 1 and num_local={self.num_local} (the chunk is part of the local "
                f"window), got {self.chunk}"
            )
        for field, known in (
            ("vote", ("soft", "hard", "raw")),
            ("gqa_map", ("group", "mod")),
            ("implementation", (None, "mask")),
        ):
            if (value := vars(self)[field]) not in known:
                raise ValueError(f"TokenSelect: {field} must be one of {known}, got {value!r}")
        check_budget(self, 1, "at least one selected token")

    def init(self, spec: LayerSpec) -> TokenState:
        batch, heads = spec.batch, spec.num_kv_heads
        return TokenState(
            cache=empty_layer(batch, heads, spec.prompt_slots + spec.max_new_tokens, spec.head_dim, spec.dtype),
            query=jnp.zeros((batch, heads, spec.group_size, spec.head_dim), jnp.float32),
            chosen=jnp.zeros((batch, self.capacity), jnp.int32),
            ready=jnp.zeros((batch,), bool),
            hits=jnp.zeros((batch,), jnp.int32),
            refreshes=jnp.zeros((batch,), jnp.int32),
        )

    def attend(self, state: TokenState, inputs: Inputs) -> tuple[Array, TokenState]:
        slots, state = self._select(state, inputs)
        real = jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32)[:, None]
        order = jnp.arange(inputs.position.shape[1], dtype=jnp.int32)[None]
        asked = jnp.where(order < real, slots.count[:, None] - real + order, EMPTY)
        query = rotate(inputs.query, asked[:, None, None], inputs.inv_freq)
        cache = state.cache
        if self.implementation == "mask":
            row = jnp.arange(len(slots.token))[:, None]
            token = jnp.where(slots.place >= 0, slots.token, cache.num_slots)
            place = jnp.full(cache.position[:, 0].shape, EMPTY, jnp.int32).at[row, token].set(slots.place, mode="drop")
            key, value = cache.key, cache.value
        else:
            place = slots.place
            key, value = (
                jnp.take_along_axis(x, slots.token[:, None, :, None], axis=2) for x in (cache.key, cache.value)
            )
        out, _ = dense_attention(
            query,
            rotate(key, place[:, None], inputs.inv_freq),
            value,
            query_position=asked,
            key_position=jnp.broadcast_to(place[:, None], key.shape[:3]),
            scale=1 / math.sqrt(query.shape[-1]),
        )
        return out, state

    def finish(self, state: TokenState, spec: LayerSpec) -> TokenState:
        return state

    def chosen(self, state: TokenState, inputs: Inputs) -> Array:
        slots, _ = self._select(state, inputs)
        shape = (*state.cache.key.shape[:2], slots.token.shape[1])
        return jnp.broadcast_to(jnp.where(slots.place >= 0, slots.token, EMPTY)[:, None], shape)

    def cost(self, state: TokenState, shared: None) -> Cost:
        """Reading is that of an average step so far: each selection scans every candidate's key."""
        tokens = jnp.minimum(state.cache.cursor, self._limit).astype(jnp.float32)
        scanned = jnp.maximum(state.cache.cursor - self.num_sink - self.num_local, 0).astype(jnp.float32)
        scanned = jnp.where(state.cache.cursor > self._limit, scanned, 0)
        steps = (state.hits + state.refreshes).astype(jnp.float32)
        hit_rate = state.hits.astype(jnp.float32) / jnp.maximum(steps, 1.0)
        row = state.cache.key.shape[1] * state.cache.key.shape[-1] * state.cache.key.dtype.itemsize
        read = (2 * tokens + (1 - hit_rate) * scanned) * row
        return Cost(attended=tokens, bytes_read=read, counters={"hit_rate": hit_rate})

    def room(self, state: TokenState) -> Array | None:
        return free_slots(state.cache, None)

    def max_tokens(self, in_prompt: bool) -> int:
        return self.chunk

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return self

    @property
    def _limit(self) -> int | Array:
        """Tokens up to which attention is dense, and slots beyond."""
        return self.num_sink + self.budget + self.num_local

    def _select(self, state: TokenState, inputs: Inputs) -> tuple[Slots, TokenState]:
        """Store the tokens, choose what they attend to: the state returned has both."""
        cache = state.cache.append(inputs.key, inputs.value, inputs.position, inputs.start)
        real = jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32)
        sparse = (cache.cursor > self._limit) & (real > 0)
        decoding = inputs.query.shape[3] == 1
        query = inputs.query[..., 0, :].astype(jnp.float32)
        hit = sparse & state.ready & (_cosine(query, state.query) >= self.theta) & decoding
        miss = sparse & ~hit
        # Where every row is short or reuses its selection, nothing is scanned.
        fresh = lax.cond(
            miss.any(), lambda: self._vote(cache, inputs.query, real, inputs.inv_freq), lambda: state.chosen
        )
        chosen = jnp.where(miss[:, None], fresh, state.chosen)
        if not decoding:
            state = dataclasses.replace(state, cache=cache, ready=state.ready & (real == 0))
            return self._slots(chosen, cache.cursor), state
        return self._slots(chosen, cache.cursor), TokenState(
            cache=cache,
            query=jnp.where(miss[:, None, None, None], query, state.query),
            chosen=chosen,
            ready=state.ready | miss,
            hits=state.hits + hit.astype(jnp.int32),
            refreshes=state.refreshes + miss.astype(jnp.int32),
        )

    def _vote(self, cache: LayerCache, query: Array, real: Array, inv_freq: Array) -> Array:
        """The ``budget`` most voted candidates of each row, int32 [B, K] ascending, then anything."""
        batch, heads, group, tokens, _ = query.shape
        order = jnp.arange(tokens, dtype=jnp.int32)[None]
        asked = rotate(query.astype(jnp.float32), (self.num_local + order)[:, None, None], inv_freq)
        among = (order < real[:, None])[:, None, None, :, None]
        mean = jnp.where(among, asked, 0).sum(axis=3) / jnp.maximum(real, 1).astype(jnp.float32)[:, None, None, None]
        if self.gqa_map == "mod":  # query head h = kv * G + g goes to KV head h mod H
            mean = mean.reshape(batch, group, heads, -1).swapaxes(1, 2)
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None]
        candidate = (slot >= self.num_sink) & (slot < cache.cursor[:, None] - self.num_local)
        wide = candidate[:, None, None]
        key = jnp.where(candidate[:, None, :, None], cache.key, 0).astype(jnp.float32)
        logits = jnp.einsum("bhgd,bhsd->bhgs", mean, key, precision=lax.Precision.HIGHEST)
        if self.vote == "soft":
            vote = jnp.where(wide, jax.nn.softmax(jnp.where(wide, logits, jnp.finfo(jnp.float32).min)), 0)
        elif self.vote == "raw":
            vote = logits
        else:
            own = self._best(jnp.where(wide, logits, -jnp.inf)).reshape(batch, -1)
            vote = jnp.zeros(candidate.shape, jnp.float32).at[jnp.arange(batch)[:, None], own].add(1, mode="drop")
            vote = vote[:, None, None]
        score = jnp.where(candidate, vote.sum(axis=(1, 2)), -jnp.inf)
        if self.kernel > 1:
            score = jnp.where(candidate, smooth(score, self.kernel, "max"), -jnp.inf)
        return jnp.sort(self._best(score), axis=-1)

    def _best(self, score: Array) -> Array:
        """Indices of the ``budget`` best along the last axis [..., S], the number S where there are fewer: [..., K]."""
        size = score.shape[-1]
        best, index = lax.top_k(score, min(self.capacity, size))
        ranked = jnp.arange(index.shape[-1], dtype=jnp.int32) < self.budget
        keep = (best > -jnp.inf) & ranked.reshape((1,) * (score.ndim - 1) + (-1,))
        short = self.capacity - index.shape[-1]
        grow = ((0, 0),) * (score.ndim - 1) + ((0, short),)
        return jnp.pad(jnp.where(keep, index, size), grow, constant_values=size)

    def _slots(self, chosen: Array, length: Array) -> Slots:
        """Sinks, chosen and local tokens side by side, or every token of a row that is short enough."""
        entry = jnp.arange(self.num_sink + self.capacity + self.num_local, dtype=jnp.int32)[None]
        length = length[:, None]
        place = jnp.where(entry >= self.num_sink + self.capacity, entry - self.capacity + self.budget, entry)
        skipped = (entry >= self.num_sink + self.budget) & (entry < self.num_sink + self.capacity)
        place = jnp.where(skipped, EMPTY, place)
        local = length - self._limit + place
        inside = (entry >= self.num_sink) & (entry < self.num_sink + self.capacity)
        picked = jnp.pad(chosen, ((0, 0), (self.num_sink, self.num_local)))
        token = jnp.where(entry < self.num_sink, entry, jnp.where(inside, picked, local))
        dense = length <= self._limit
        token = jnp.where(dense, place, token)
        place = jnp.where(dense & (place >= length), EMPTY, jnp.broadcast_to(place, token.shape))
        return Slots(token=jnp.where(place >= 0, token, 0), place=place, count=jnp.minimum(length[:, 0], self._limit))


def _cosine(one: Array, other: Array) -> Array:
    """Cosine over all heads together: [B, H, G, D] twice to float32 [B]."""
    axes = (1, 2, 3)
    norm = jnp.sqrt(jnp.sum(one * one, axis=axes) * jnp.sum(other * other, axis=axes))
    return jnp.sum(one * other, axis=axes) / jnp.maximum(norm, 1e-30)
