"""TokenSelect: a soft vote of all heads selects one set of tokens per layer; their positions are re-numbered without a gap.

Stored: all keys **before** RoPE, all values, and the last query that made a selection with its selection. A chunk of queries
selects together; in decoding a chunk is one query. Its candidates are the tokens t between the first ``num_sink`` and the
newest ``num_local``::

    qbar[h] = mean over the chunk's queries i of rope(q[i, h], num_local + i)
    vote[t] = sum over all query heads h of  softmax over t of ( qbar[h] . k[t] )        no 1/sqrt(D)

The ``budget`` tokens with the most votes stand, in order, between the sinks and the local tokens. In this list the key at
index j is rotated at position j, and the queries at the last indices. So no position beyond ``num_sink + budget + num_local``
occurs, and a context can be longer than the trained length. Up to that many tokens attention is dense. Prefill follows the
same rule, ``chunk`` tokens at a time. A decode step reuses the last selection if its query has a cosine of at least
``theta`` with the query that made it.

**Source**: Wu et al., "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic
Token-Level KV Cache Selection" (arXiv:2411.02886, sections 4 and 5, table 4); pzs19/TokenSelect 8e1e97f for sinks, chunk and
the rotation of scoring queries.

**Departures**: votes are float32, not bfloat16. An even width of ``kernel`` keeps the length of the vote here; in the code
it shortens the vote by one. Several tokens after the prompt (`extend`) select like a chunk, and the selection before them is
not reused.

The default chunk of 256 tokens is half of the paper's; ``theta=2`` never reuses a selection, as in the released code, which
also pools votes (``kernel=5`` for Qwen2). A query head is scored against the KV head that it attends to; paper and code
take ``head mod num_kv_heads``. What these readings score: docs/notebook/readings-others.md.
"""

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerSpec, LayerStorage
from kvjax.cache.divided import best_of_rows, here, log_total, merged, part_slots, total
from kvjax.cache.offload import Near, empty_storage, offload
from kvjax.methods.budgets import scaled
from kvjax.protocol.method import Cost, Inputs, LayerMethod
from kvjax.protocol.typing import EMPTY, pytree, static, traced
from kvjax.selection import smooth
from pallas_kernels import axes
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.choose.tokenselect.token_list import token_list
from pallas_kernels.formats.quantised import vector_bytes, with_vectors
from pallas_kernels.numerics import finite_or_zero
from pallas_kernels.query.tokenselect.chunk_query import chunk_query
from pallas_kernels.query.tokenselect.rotated_rows import rotated_rows
from pallas_kernels.query.tokenselect.step_query import step_query
from pallas_kernels.score.tokenselect.token_vote import token_vote


@pytree
class TokenState:
    """Un-rotated storage and the last selection."""

    cache: LayerStorage
    query: Array  # float32 [B, H, G, D], un-rotated, the last query that made a selection
    chosen: Array  # int32 [B, K], its selection, ascending
    ready: Array  # bool [B], whether there is a selection to reuse
    hits: Array  # int32 [B], decode steps that reused a selection
    refreshes: Array  # int32 [B], decode steps that made a selection


@pytree
class Slots:
    """The tokens to attend to, the same for all heads, and the queries among them.

    A *place* is an index into this list; keys and queries are rotated at their places.
    """

    token: Array  # int32 [B, K], slots in order
    used: Array  # bool [B, K], True for the first entries, which are tokens
    first: Array  # int32 [B], place of the first query
    real: Array  # int32 [B], queries that are no padding; they stand at the last used places

    @property
    def place(self) -> Array:
        """The place of each entry, int32 [B, K]: a constant, because ``jnp.arange`` would be computed in every step.

        Each row has its own copy: JAX gives XLA a view of one row as this row and a broadcast, and XLA an ``iota`` of both.
        """
        return jnp.asarray(np.tile(np.arange(self.token.shape[1], dtype=np.int32), (len(self.token), 1)))


@pytree
class TokenSelect(LayerMethod):
    """Token-level selection by a soft vote of the heads; see the module docstring."""

    budget: int | Array = traced("tokens selected besides sinks and local tokens", default=2048, least=1, within="capacity")
    capacity: int = static("entries allocated for them; None = budget", default=None, least=1)
    num_sink: int = static("first tokens, always attended", default=128, least=0)
    num_local: int = static("newest tokens, always attended; a prompt chunk belongs to them", default=512, least=2)
    chunk: int = static("prompt tokens that share one selection, at most num_local", default=256, least=2)
    theta: float | Array = traced(
        "least cosine with which a decode step reuses the last selection, traced; above 1 = never", default=0.9
    )
    kernel: int = static("max-pooling window over votes, in tokens; 1 = no pooling", default=1, least=1)
    offload: bool | float = static(
        "values (keys are scanned) in host memory; a number: share of the layers", default=False, least=0, most=1
    )

    PAPER: ClassVar[str] = "arXiv:2411.02886"

    extrapolates = True
    moves_slots = False
    lacks = ()
    slot_block = 1

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        share, note = scaled(128 + 2048 + 512, length)
        local = max(int(512 * share), 1)
        budget, sinks = max(int(2048 * share), 1), int(128 * share)
        # The paper's chunk is as long as the local window. Half of it finds more, see docs/notebook/readings-others.md.
        chunk = min(max(local // 2, 2), local)
        return {"budget": budget, "num_sink": sinks, "num_local": local, "chunk": chunk, "theta": 0.9}, note

    def check(self) -> None:
        if self.chunk > self.num_local:
            raise ValueError(
                f"TokenSelect: chunk must be at most num_local={self.num_local}, because the chunk is part of the local "
                f"window, got {self.chunk}"
            )

    def init(self, spec: LayerSpec) -> TokenState:
        batch, heads = spec.batch, spec.num_kv_heads
        return TokenState(
            cache=empty_storage(
                spec, part_slots(spec, spec.prompt_slots + spec.max_new_tokens, self.slot_block), values_only=True
            ),
            query=jnp.zeros((batch, heads, spec.group_size, spec.head_dim), jnp.float32),
            chosen=jnp.zeros((batch, self.capacity), jnp.int32),
            ready=jnp.zeros((batch,), bool),
            hits=jnp.zeros((batch,), jnp.int32),
            refreshes=jnp.zeros((batch,), jnp.int32),
        )

    def attend(self, state: TokenState, inputs: Inputs) -> tuple[Array, TokenState]:
        slots, query, state = self._select(state, inputs)
        cache, tokens = state.cache, query.shape[3]
        scale = 1 / math.sqrt(query.shape[-1])
        token, used = here(slots.token, slots.used, cache)
        if inputs.start is None and tokens == 1:
            out, lse = gather_attention(
                query[..., 0, :], *cache.stored, token[:, None], used[:, None], scale=scale, place=slots.place[:, None],
                inv_freq=inputs.inv_freq, rows=cache.rows,
            )  # fmt: skip
            out, _ = with_sinks(*merged(out, lse, cache), inputs.sinks)
            return out[..., None, :], state
        key, value = cache.stored
        if cache.rows is not None:
            value = with_vectors(value, cache.rows.host)
        key, value = rotated_rows(key, value, token, inputs.inv_freq)
        if cache.parts > 1:  # every device gets the whole list, which is short
            key, value = (total(jnp.where(used[:, None, :, None], x, 0), cache) for x in (key, value))
        made = prefix_attention(query, key, value, start=slots.first, length=slots.real, scale=scale)
        return with_sinks(*made, inputs.sinks)[0], state

    def finish(self, state: TokenState, spec: LayerSpec) -> TokenState:
        if not spec.offloaded:
            return state
        near, rows = Near(first=self.num_sink, newest=self.num_local), state.cache.rows
        host = None if rows is None else rows.host
        return dataclasses.replace(state, cache=offload(state.cache.resident(), near, host=host, values_only=True))

    def chosen(self, state: TokenState, inputs: Inputs) -> Array:
        slots, _, _ = self._select(state, inputs)
        shape = (*state.cache.key.shape[:2], slots.token.shape[1])
        return jnp.broadcast_to(jnp.where(slots.used, slots.token, EMPTY)[:, None], shape)

    def cost(self, state: TokenState, shared: None) -> Cost:
        """Count the cost of an average step so far. A step that makes a selection reads every candidate's key."""
        tokens = jnp.minimum(state.cache.cursor, self._limit).astype(jnp.float32)
        scanned = jnp.maximum(state.cache.cursor - self.num_sink - self.num_local, 0).astype(jnp.float32)
        scanned = jnp.where(state.cache.cursor > self._limit, scanned, 0)
        steps = (state.hits + state.refreshes).astype(jnp.float32)
        hit_rate = state.hits.astype(jnp.float32) / jnp.maximum(steps, 1.0)
        heads = state.cache.position.shape[1]
        row, key_row = heads * state.cache.slot_bytes, heads * vector_bytes(state.cache.stored[0])  # of all heads
        far = jnp.maximum(tokens - state.cache.copied().astype(jnp.float32), 0)  # values without a copy on the device
        return Cost(
            attended=tokens,
            kv_bytes=tokens * row + (1 - hit_rate) * scanned * key_row,
            metadata_bytes=jnp.zeros_like(tokens),
            bus_bytes=far * (heads * state.cache.slot_bus_bytes),
            counters={"hit_rate": hit_rate},
        )

    def max_tokens(self, in_prompt: bool) -> int:
        return self.chunk

    @property
    def _limit(self) -> int | Array:
        """Up to this many tokens attention is dense; in a longer context this many are attended."""
        return self.num_sink + self.budget + self.num_local

    def _select(self, state: TokenState, inputs: Inputs) -> tuple[Slots, Array, TokenState]:
        """Store the tokens, select the tokens they attend to, and rotate the queries.

        Returns:
            The chosen tokens, the rotated queries [B, H, G, T, D], and the state with the tokens and the selection.
        """
        tokens, query = inputs.query.shape[3], inputs.query
        decoding = tokens == 1 and inputs.start is None  # a prompt chunk can be one token
        if decoding:  # the launch takes the projection whole, and turns it by no angle; without the query XLA would cut it up
            unmoved = jnp.zeros_like(inputs.inv_freq)
            query, cache = state.cache.append_rotated(query, inputs.key, inputs.value, inputs.position, unmoved)
        else:
            cache = state.cache.append(inputs.key, inputs.value, inputs.position, inputs.start)
        sinks, local = self.num_sink, self.num_local
        real = jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32)
        first = jnp.minimum(cache.cursor, self._limit) - real
        if not decoding:
            miss = (cache.cursor > self._limit) & (real > 0)
            stop = jnp.where(miss, cache.cursor - local, 0)
            mean, query = chunk_query(inputs.query, real, first, inputs.inv_freq, num_local=local)
            fresh = self._best(cache, mean, stop, jnp.where(miss, self.budget, 0))
            # `extra` entries at the end keep a chunk's queries inside the list, even if few of them are real.
            _, token, used = token_list(
                fresh, cache.cursor, cache.cursor, budget=self.budget, extra=tokens, num_sink=sinks, num_local=local
            )
            state = dataclasses.replace(state, cache=cache, ready=state.ready & (real == 0))
            return Slots(token=token, used=used, first=first, real=real), query, state
        position = inputs.position[:, 0]
        step = step_query(
            query[..., 0, :], state.query, state.ready, state.hits, state.refreshes, cache.cursor, position,
            budget=self.budget, theta=self.theta, inv_freq=inputs.inv_freq, num_sink=sinks, num_local=local,
        )  # fmt: skip
        # A short row, or a row that reuses its selection, has no candidates and wants none. Its kernel programs end at once.
        fresh = self._best(cache, step.mean, step.stop, step.wanted)
        chosen, token, used = token_list(
            fresh, cache.cursor, position, budget=self.budget, miss=step.miss, chosen=state.chosen, num_sink=sinks,
            num_local=local,
        )  # fmt: skip
        state = TokenState(
            cache=cache, query=step.last, chosen=chosen, ready=step.ready, hits=step.hits, refreshes=step.refreshes
        )
        return Slots(token=token, used=used, first=first, real=real), step.rotated[..., None, :], state

    def _best(self, cache: LayerStorage, query: Array, stop: Array, wanted: Array) -> Array:
        """Select the ``wanted`` int32 [B] candidates with the most votes, up to slot ``stop`` int32 [B].

        Returns:
            int32 [B, K], ascending, and 0 behind them.
        """
        capacity = self.capacity
        score = self._score(cache, query, stop)[:, None]
        return best_of_rows(score, wanted[:, None], capacity, cache)[:, 0]

    def _score(self, cache: LayerStorage, query: Array, stop: Array) -> Array:
        """Sum the votes for candidates from ``num_sink`` up to ``stop`` int32 [B], -inf for other slots: float32 [B, S]."""
        batch, size = len(query), cache.num_slots
        asked = stop > self.num_sink
        if cache.parts == 1:
            score = _voted(token_vote(query, cache.key, start=self.num_sink, stop=stop), asked)
        else:
            score = lax.cond(
                asked.any(),
                lambda: self._plain_votes(cache, query, stop),
                lambda: jnp.full((batch, size), -jnp.inf, jnp.float32),
            )
        if self.kernel > 1:
            # A window may reach over the end of a part.
            whole = axes.joined(score, 1, axes.SLOTS) if cache.parts > 1 else score
            pooled = smooth(whole, self.kernel, "max")
            pooled = lax.dynamic_slice_in_dim(pooled, cache.first, size, 1) if cache.parts > 1 else pooled
            score = jnp.where(score > -jnp.inf, pooled, -jnp.inf)
        return score

    def _plain_votes(self, cache: LayerStorage, query: Array, stop: Array) -> Array:
        """Score as `_score` where the slots are divided over devices: the softmax is over all devices' candidates."""
        slot = cache.first + jnp.arange(cache.num_slots, dtype=jnp.int32)[None]
        candidate = (slot >= self.num_sink) & (slot < stop[:, None])
        key = jnp.where(candidate[:, None, :, None], cache.key, 0).astype(jnp.float32)
        logits = jnp.einsum("bhgd,bhsd->bhgs", query, key, precision=lax.Precision.HIGHEST)
        logits = jnp.where(candidate[:, None, None], logits, -jnp.inf)
        lse = log_total(jax.nn.logsumexp(logits, axis=-1), cache)
        vote = jnp.exp(logits - finite_or_zero(lse)[..., None]).sum(axis=(1, 2))
        return jnp.where(candidate, axes.total(vote), -jnp.inf)


def _voted(score: Array, asked: Array) -> Array:
    """Sum votes float32 [B, S] over the devices that share the heads, if some row of ``asked`` bool [B] has candidates."""
    if not axes.is_split(axes.MODEL):
        return score
    return lax.cond(asked.any(), axes.total, lambda score: score, score)
