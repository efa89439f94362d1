"""Layers with a sliding window: their model attends only to the newest tokens there, so only these tokens are stored.

A model says in its member ``windows`` (`kvjax.protocol.typing.Model`) which layers have a window. In a layer with a
window of W
tokens, the query at position i sees the keys at positions j with ``i - W < j <= i``. Such a layer runs `SlidingWindow`,
whatever the method: the method applies only to layers without a window. The storage is a ring of W slots in which the token
at position p is in slot ``p mod W``, so a new token takes the place of the token that has just left the window.

Keys are rotated at their true positions, also under methods that renumber positions in their layers: distances inside a
window are below W, however long the text is.

**Source**: Jiang et al., "Mistral 7B" (arXiv:2310.06825, section 2: sliding window attention, rolling buffer cache); the mask
is the mask of Hugging Face's transformers.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.sinks import with_sinks
from kvjax.cache.storage import LayerSpec, PlainCache, empty_cache
from kvjax.protocol.method import Cost, Inputs, LayerMethod, free_slots
from kvjax.protocol.slots import cost_of_all
from kvjax.protocol.typing import pytree, static
from pallas_kernels.attend.causal_attention import causal_attention
from pallas_kernels.attend.dense_decode import dense_decode
from pallas_kernels.numerics import product_precision
from pallas_kernels.soft_cap import capped

_LOGITS = 1 << 20  # the most logits, queries x keys, that the prompt's attention holds at once per query head


@pytree
class SlidingWindow(LayerMethod):
    """The storage and the attention of a layer with a sliding window; see the module docstring.

    The cursor lies in [0, W], and the next token goes to slot ``cursor mod W``. If prompt and new tokens are fewer than W,
    the cache has a slot for each token.
    """

    window: int = static("W, tokens that a query sees, itself included", least=1)

    keeps = "the model's window"
    evicts = True
    slot_block = 0  # a window is small
    lacks = ()  # a window is small, and keeps the dtype of the model

    def init(self, spec: LayerSpec) -> PlainCache:
        slots = min(self.window, spec.prompt_slots + spec.max_new_tokens)
        return empty_cache(spec.batch, spec.num_kv_heads, slots, spec.head_dim, spec.dtype)

    def attend(self, state: PlainCache, inputs: Inputs) -> tuple[Array, PlainCache]:
        if inputs.start is None and inputs.query.shape[3] == 1:
            return self._step(state, inputs)
        query, key = inputs.rotated()
        if isinstance(inputs.start, int):  # the whole prompt: nothing is stored yet
            if inputs.sinks is None:  # so a fused kernel can do it
                out = causal_attention(query, key, inputs.value, window=self.window)
            else:
                out = window_attention(query, key, inputs.value, inputs.position >= 0, self.window, inputs.sinks)
        else:
            old_key, old_value, present = self._earlier(state, inputs.position[:, 0])
            out = window_attention(
                query,
                jnp.concatenate([old_key, key], axis=2),
                jnp.concatenate([old_value, inputs.value], axis=2),
                jnp.concatenate([present, inputs.position >= 0], axis=1),
                self.window,
                inputs.sinks,
            )
        return out, self._stored(state, key, inputs.value, inputs.position)

    def chosen(self, state: PlainCache, inputs: Inputs) -> Array:
        return self._appended(state, inputs)[1].position

    def cost(self, state: PlainCache, shared: Any) -> Cost:
        return cost_of_all(state)

    def room(self, state: PlainCache) -> Array | None:
        return free_slots(state, self.window)

    def _step(self, state: PlainCache, inputs: Inputs) -> tuple[Array, PlainCache]:
        query, cache = self._appended(state, inputs)
        out, lse = dense_decode(
            query[..., 0, :],
            cache.key,
            cache.value,
            position=cache.position,
            limit=jnp.minimum(inputs.position[:, 0] + 1, self.window),
            scale=1 / math.sqrt(query.shape[-1]),
        )
        return with_sinks(out, lse, inputs.sinks)[0][..., None, :], cache

    def _appended(self, state: PlainCache, inputs: Inputs) -> tuple[Array, PlainCache]:
        """Rotate the query of a decode step, and store the step's token in the slot of the oldest token."""
        ring = dataclasses.replace(state, cursor=state.cursor % self.window)
        return inputs.append_to(ring)

    def _earlier(self, state: PlainCache, first: Array) -> tuple[Array, Array, Array]:
        """Gather the tokens at the W - 1 positions before ``first`` int32 [B], in order of position.

        Returns:
            Keys and values [B, H, P, D], and whether each token is stored, bool [B, P]. P is W - 1, or smaller if there are
            fewer slots. The key and value of a token that is not stored may be anything.
        """
        count = min(self.window - 1, state.num_slots)
        wanted = first[:, None] - count + jnp.arange(count, dtype=jnp.int32)[None]
        slot = jnp.minimum(wanted % self.window, state.num_slots - 1)
        # Every head stores the same positions.
        present = (wanted >= 0) & (jnp.take_along_axis(state.position[:, 0], slot, axis=1) == wanted)
        index = slot[:, None, :, None]
        key, value = (jnp.take_along_axis(x, index, axis=2) for x in (state.key, state.value))
        return key, value, present

    def _stored(self, state: PlainCache, key: Array, value: Array, position: Array) -> PlainCache:
        """Store rotated tokens at ``position`` int32 [B, T]: every slot keeps the newest of its tokens."""
        first, real = position[:, :1], jnp.sum(position >= 0, axis=1, dtype=jnp.int32)[:, None]
        last = first + real - 1
        slot = jnp.arange(state.num_slots, dtype=jnp.int32)[None]
        newest = last - (last - slot) % self.window  # the newest position of this slot
        taken = (newest >= first) & (real > 0)
        index = jnp.where(taken, newest - first, 0)[:, None, :, None]

        def put(old: Array, new: Array) -> Array:
            return jnp.where(taken[:, None, :, None], jnp.take_along_axis(new, index, axis=2), old)

        return PlainCache(
            key=put(state.key, key),
            value=put(state.value, value),
            position=jnp.where(taken[:, None], newest[:, None], state.position),
            cursor=jnp.where(real > 0, last % self.window + 1, state.cursor[:, None])[:, 0],
        )


def window_attention(
    query: Array, key: Array, value: Array, present: Array, window: int, sinks: Array | None = None
) -> Array:
    """Attend with a chunk of tokens, each to the window that ends with it.

    Queries go in blocks, and a block attends only to keys inside one of its windows. So time and memory grow with the tokens
    times the window, and not with the square of the tokens.

    Args:
        query: [B, H, G, T, D], rotated.
        key: [B, H, P + T, D], rotated: of P earlier tokens and of the chunk itself, at consecutive positions.
        value: [B, H, P + T, D].
        present: bool [B, P + T], False for a token that does not exist; its key and value may be anything.

    Returns:
        [B, H, G, T, D] in the dtype of the query; 0 for a query that sees nothing.
    """
    tokens, total = query.shape[3], key.shape[2]
    size = min(tokens, max(16, _LOGITS // window))
    blocks = -(-tokens // size)
    width = min(window - 1 + size, total)
    precision, scale = product_precision(query.dtype), 1 / math.sqrt(query.shape[-1])
    value = jnp.where(present[:, None, :, None], value, 0)  # a weight of 0 does not silence a NaN

    def attend(block: Array | int) -> Array:
        """Attend with one block of queries: [B, H, G, size, D]."""
        begin = block * size
        start = jnp.clip(total - tokens + begin - (window - 1), 0, total - width)
        q = lax.dynamic_slice_in_dim(padded, begin, size, 3)
        k, v = (lax.dynamic_slice_in_dim(x, start, width, 2) for x in (key, value))
        asked = (total - tokens + begin + jnp.arange(size, dtype=jnp.int32))[:, None]
        kept = (start + jnp.arange(width, dtype=jnp.int32))[None]
        seen = (kept <= asked) & (kept > asked - window)
        seen = seen[None] & lax.dynamic_slice_in_dim(present, start, width, 1)[:, None]
        seen = seen[:, None, None]
        logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k, precision=precision, preferred_element_type=jnp.float32)
        logits = jnp.where(seen, capped(logits * scale), jnp.finfo(jnp.float32).min)
        weight = jax.nn.softmax(logits, axis=-1)
        weight = jnp.where(seen, weight, 0).astype(value.dtype)
        out = jnp.einsum("bhgts,bhsd->bhgtd", weight, v, precision=precision, preferred_element_type=jnp.float32)
        if sinks is not None:
            out, _ = with_sinks(out, jax.nn.logsumexp(logits, axis=-1), sinks)
        return out.astype(query.dtype)

    padded = jnp.pad(query, [(0, 0)] * 3 + [(0, blocks * size - tokens), (0, 0)])
    if blocks == 1:
        return attend(0)
    out = jnp.moveaxis(lax.map(attend, jnp.arange(blocks, dtype=jnp.int32)), 0, 3)
    return out.reshape(padded.shape)[..., :tokens, :]
