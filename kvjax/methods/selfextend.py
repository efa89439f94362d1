"""SelfExtend: Full attention with true positions nearby and with positions in groups far away.

Stored: keys **before** RoPE, and values, of all tokens. With w = ``window`` and g = ``group_size``, a query at position i
sees the key at j as if the two stood at

    i, j                                     where i - j < w
    floor(i / g) + w - floor(w / g), floor(j / g)      elsewhere

under one softmax. A text of n tokens then has no distance above w + (n - w) / g, so a model that was trained for L tokens
can process (L - w) * g + w tokens. The paper's authors advise to stay below two thirds of L.

**Source**: Jin et al., "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning" (arXiv:2401.01325, section 3 and
algorithm 1); datamllab/LongLM cdbbb06.

**Departures**: ``window`` must be a multiple of ``group_size``; the released code mixes true and floored division where it is
not. Queries are not scaled by the logarithm of the length, which is off in the released code too.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerCache, LayerSpec
from kvjax.cache.quantised import empty_resident
from kvjax.fields import known
from kvjax.method import Cost, Inputs, LayerMethod, free_slots
from kvjax.rope import rotate
from kvjax.slots import cost_of_all
from kvjax.typing import pytree, static, traced
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.numerics import bounded_loop, finite_or_zero, merge_pair, product_precision
from pallas_kernels.soft_cap import capped


@pytree
class SelfExtend(LayerMethod):
    """True positions nearby, grouped positions far away; see the module docstring."""

    group_size: int | Array = traced(default=8, least=1)  # far tokens that share a position
    window: int | Array = traced(default=1024, least=1)  # newest tokens at their true distance, a multiple of group_size
    chunk: int = static(default=256, least=1)  # prompt tokens read at once; changes memory, not results
    block: int = static(default=1024, least=1)  # stored tokens read at once; changes memory, not results

    PAPER: ClassVar[str] = "arXiv:2401.01325"

    extrapolates = True
    quantisable = True
    takes_sinks = True

    def check(self) -> None:
        group, window = known(self.group_size), known(self.window)
        if group is not None and window is not None and (window % group).any():
            raise ValueError(f"SelfExtend: window must be a multiple of group_size={group}, got {window}")

    def init(self, spec: LayerSpec) -> LayerCache:
        slots = spec.prompt_slots + spec.max_new_tokens
        return empty_resident(spec, slots)

    def attend(self, state: LayerCache, inputs: Inputs) -> tuple[Array, LayerCache]:
        query, key, value, position, inv_freq = inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq
        if position.shape[1] > 1:
            cache = state.append(key, value, position, inputs.start)
            return self._attend(query, cache, state.cursor, position, inputs), cache
        # Angles of zero rotate nothing. The query goes through the kernel that stores the token, so XLA need not copy it.
        query, cache = state.append_rotated(query, key, value, position, jnp.zeros_like(inv_freq))
        return self._attend_one(query, cache, position, inputs), cache

    def finish(self, state: LayerCache, spec: LayerSpec) -> LayerCache:
        return state

    def chosen(self, state: LayerCache, inputs: Inputs) -> Array:
        return state.append(inputs.key, inputs.value, inputs.position).position

    def cost(self, state: LayerCache, shared: None) -> Cost:
        return cost_of_all(state)

    def room(self, state: LayerCache) -> Array | None:
        return free_slots(state, None)

    def max_tokens(self, in_prompt: bool) -> int:
        return self.chunk

    def _attend_one(self, query: Array, cache: LayerCache, position: Array, inputs: Inputs) -> Array:
        """Attend with one token, T = 1, as `_attend`.

        Keys are rotated as they are read, by their places relative to the query, so the query needs no rotation.
        """
        kept, place = cache.position[:, :1], self._far(position)  # every head has the same positions
        near = position[:, None] - kept < self.window
        out, lse = gather_attention(
            query[..., 0, :],
            *cache.stored,
            jnp.asarray(np.broadcast_to(np.arange(cache.num_slots, dtype=np.int32), kept.shape)),  # jnp.arange is a launch
            (kept >= 0) & (kept <= position[:, None]),
            place=jnp.where(near, kept - position[:, None], kept // self.group_size - place[:, None]),
            inv_freq=inputs.inv_freq,
            scale=1 / math.sqrt(query.shape[-1]),
        )
        return with_sinks(out, lse, inputs.sinks)[0][..., None, :]

    def _attend(self, query: Array, cache: LayerCache, stored: Array, position: Array, inputs: Inputs) -> Array:
        """Attend with queries [B, H, G, T, D] at ``position`` int32 [B, T], to the first ``stored`` slots and the new tokens.

        Tokens that are far from all queries take one product with keys in groups; nearer tokens are read a block at a time.
        """
        group, scale, inv_freq = jnp.asarray(self.group_size), 1 / math.sqrt(query.shape[-1]), inputs.inv_freq
        near, far = (rotate(query, at[:, None, None], inv_freq) for at in (position, self._far(position)))
        # Tokens up to the newest that is far from the first query. A row without a query reads nothing.
        count = jnp.where(position[:, 0] >= 0, jnp.clip(position[:, 0] - self.window + 1, 0, stored), stored)
        held = (cache.position >= 0)[..., None]
        key, value = (jnp.where(held, x, 0) for x in (cache.key, cache.value))  # an empty slot may hold anything
        past = past_attention(far, rotate(key, cache.position // group, inv_freq), value, count=count, scale=scale)
        out, lse = self._nearer(near, far, cache, count, position, inv_freq)
        out, _ = with_sinks(*merge_pair(*past, out, lse), inputs.sinks)
        return jnp.where((position >= 0)[:, None, None, :, None], out, 0)

    def _nearer(
        self, near: Array, far: Array, cache: LayerCache, count: Array, position: Array, inv_freq: Array
    ) -> tuple[Array, Array]:
        """Attend to the slots behind the first ``count``, with queries at true and at grouped angles; with the lse."""
        group, window, scale = jnp.asarray(self.group_size), jnp.asarray(self.window), 1 / math.sqrt(near.shape[-1])
        size = min(self.block, cache.num_slots)

        def add(step: Array, sums: tuple[Array, Array], operands: tuple) -> tuple[Array, Array]:
            first, count, near, far, cache, position, inv_freq, group, window = operands
            step = first + step
            start = jnp.minimum(step * size, cache.num_slots - size)  # the last block may begin in the one before
            key, value, kept = (
                lax.dynamic_slice_in_dim(x, start, size, 2) for x in (cache.key, cache.value, cache.position)
            )
            slot = start + jnp.arange(size, dtype=jnp.int32)[None]
            held = (kept >= 0) & (slot >= jnp.maximum(step * size, count)[:, None])[:, None]
            key, value = (jnp.where(held[..., None], x, 0) for x in (key, value))  # an empty slot may hold anything
            distance = (position[:, None, :, None] - kept[:, :, None, :])[:, :, None]  # [B, H, 1, T, s]
            logits = jnp.where(
                distance < window,
                _products(near, rotate(key, kept, inv_freq)),
                _products(far, rotate(key, kept // group, inv_freq)),
            )
            logits = jnp.where(held[:, :, None, None] & (distance >= 0), capped(logits * scale), -jnp.inf)
            shift = finite_or_zero(logits.max(axis=-1))
            weight = jnp.exp(logits - shift[..., None])
            total = weight.sum(axis=-1)
            out = jnp.einsum("bhgts,bhsd->bhgtd", weight, value.astype(jnp.float32), precision=lax.Precision.HIGHEST)
            return merge_pair(*sums, out / jnp.where(total > 0, total, 1)[..., None], shift + jnp.log(total))

        blocks = (jnp.max(cache.cursor) + size - 1) // size
        nothing = jnp.zeros(near.shape, jnp.float32), jnp.full(near.shape[:-1], -jnp.inf, jnp.float32)
        first, most = jnp.min(count) // size, -(-cache.num_slots // size)
        operands = first, count, near, far, cache, position, inv_freq, group, window
        return bounded_loop(add, most, blocks - first, nothing, operands)

    def _far(self, position: Array) -> Array:
        """Compute the position at which a query at ``position`` meets keys in groups."""
        return position // self.group_size + self.window - self.window // self.group_size


def _products(query: Array, key: Array) -> Array:
    """Compute q . k in float32: [B, H, G, T, s]."""
    return jnp.einsum(
        "bhgtd,bhsd->bhgts", query, key, precision=product_precision(query.dtype), preferred_element_type=jnp.float32
    )
