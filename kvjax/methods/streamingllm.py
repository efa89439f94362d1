"""StreamingLLM: keep the first few tokens (attention sinks) and a window of the newest, re-numbered without a gap.

Stored: ``num_sink`` sinks and ``budget - num_sink`` recent tokens, with keys **before** RoPE. The token in slot j is rotated
at position j, and the query at its own slot. So no position above ``budget`` occurs, and a text can be longer than the
trained length. Prefill follows the same rule: every query sees the sinks and its own window, exactly as if tokens came one by
one.

**Source**: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv:2309.17453, section 3.2);
mit-han-lab/streaming-llm 2e50426 (position shift).

**Departures**: the released demo attends densely inside a prompt and evicts afterwards. Here the window applies inside the
prompt too, as if the demo read it token by token. So the result does not depend on how tokens are grouped.
"""

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerCache, LayerSpec
from kvjax.cache.quantised import empty_resident
from kvjax.protocol.method import Cost, Inputs, LayerMethod, free_slots
from kvjax.protocol.slots import check_budget, cost_of_all
from kvjax.protocol.typing import EMPTY, pytree, static, traced
from kvjax.rope import rotate, rotate_stored
from kvjax.selection import top_slots
from pallas_kernels.attend.dense_attention import dense_attention
from pallas_kernels.attend.dense_decode import Rotation, dense_decode
from pallas_kernels.numerics import merge_pair


@pytree
class StreamingLLM(LayerMethod):
    """Sinks and a sliding window with re-numbered positions; see the module docstring."""

    budget: int | Array = traced("tokens kept, sinks included", default=1024, least=1, within="capacity")
    capacity: int = static("slots allocated for them; None = budget", default=None, least=1)
    num_sink: int = static("first tokens, always kept", default=4, least=1)

    PAPER: ClassVar[str] = "arXiv:2309.17453"
    chunk = 128  # prompt tokens read at once; changes memory, not results

    extrapolates = True
    lacks = ()
    keeps = "`budget` tokens per KV head"
    evicts = True
    slot_block = 0  # the storage is bounded

    def check(self) -> None:
        check_budget(self, self.num_sink + 1, f"num_sink={self.num_sink} and one recent token")

    def init(self, spec: LayerSpec) -> LayerCache:
        slots = min(self._slots(), spec.prompt_slots + spec.max_new_tokens)
        return empty_resident(spec, slots)

    def attend(self, state: LayerCache, inputs: Inputs) -> tuple[Array, LayerCache]:
        query, key, value, position, inv_freq = inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq
        if position.shape[1] > 1:
            cache = state.append(key, value, position)
            # Without the barrier XLA copies the cache, which is read before tokens are evicted in place.
            out, cache = lax.optimization_barrier((self._attend(query, cache, position, inputs), cache))
            return out, self._evict(cache, position.shape[1])
        # Angles of zero rotate nothing. The query goes through the kernel that stores the token, so XLA need not copy it.
        query, cache = state.append_rotated(query, key, value, position, jnp.zeros_like(inv_freq))
        out, cache = lax.optimization_barrier((self._attend_one(query, cache, position, inputs), cache))
        return out, self._evict(cache, 1)

    def chosen(self, state: LayerCache, inputs: Inputs) -> Array:
        return state.append(inputs.key, inputs.value, inputs.position).position

    def cost(self, state: LayerCache, shared: None) -> Cost:
        return cost_of_all(state)

    def room(self, state: LayerCache) -> Array | None:
        return free_slots(state, self._slots())

    def max_tokens(self, in_prompt: bool) -> int:
        return self.chunk

    def _slots(self) -> int:
        """Count slots for the budget and for one more chunk: storage of this size never fills."""
        return self.capacity + self.chunk

    def _attend(self, query: Array, cache: LayerCache, position: Array, inputs: Inputs) -> Array:
        """Attend with several queries [B, H, G, T, D] at ``position`` int32 [B, T]: [B, H, G, T, D].

        Two rotations under one softmax: towards the sinks a query stands at slot ``budget`` at most, and towards other
        tokens at its true distance.
        """
        sinks, stored, inv_freq = self.num_sink, cache.position, inputs.inv_freq
        # In the window only differences of angles matter. Positions are counted from the oldest kept token, so that they are
        # small and their angles exact.
        base = jnp.maximum(position[:, :1] - self.budget, 0)
        slot = jnp.minimum(position, self.budget)
        far_query = rotate(query, slot[:, None, None], inv_freq)
        near_query = rotate(query, (position - base)[:, None, None], inv_freq)
        key_far = rotate(cache.key[:, :, :sinks], stored[:, :, :sinks], inv_freq)
        options: dict[str, Any] = {"query_position": position, "scale": 1 / math.sqrt(query.shape[-1])}
        value, turn = cache.value, rotate_stored if inputs.start is None else rotate
        far = dense_attention(far_query, key_far, value[:, :, :sinks], key_position=stored[:, :, :sinks], **options)
        near = dense_attention(
            near_query,
            turn(cache.key, stored - base[:, None], inv_freq),
            value,
            key_position=stored.at[:, :, :sinks].set(EMPTY),
            query_first=position - (self.budget - sinks),
            **options,
        )
        return with_sinks(*merge_pair(*near, *far), inputs.sinks)[0]

    def _attend_one(self, query: Array, cache: LayerCache, position: Array, inputs: Inputs) -> Array:
        """Attend with one token, T = 1, to all stored tokens: `_evict` left its window.

        Keys are rotated as they are read, by their places relative to the query, so the query needs no rotation.
        """
        origin = jnp.concatenate([jnp.minimum(position, self.budget), position], axis=1)
        out, lse = dense_decode(
            query[..., 0, :],
            *cache.stored,
            position=cache.position,
            limit=cache.cursor,
            scale=1 / math.sqrt(query.shape[-1]),
            rotation=Rotation(inv_freq=inputs.inv_freq, origin=origin, first=self.num_sink),
        )
        return with_sinks(out, lse, inputs.sinks)[0][..., None, :]

    def _evict(self, cache: LayerCache, tokens: int) -> LayerCache:
        """Evict all tokens except the sinks and the newest. Positions differ, so there are no ties."""
        if tokens == 1:
            return cache.evict(None, budget=self.budget, first=self.num_sink)[0]
        value = jnp.where(cache.position < self.num_sink, jnp.inf, cache.position.astype(jnp.float32))
        slots, keep = top_slots(value, cache.valid, self.budget, self.capacity)
        return cache.compact_in_place(slots, keep)
