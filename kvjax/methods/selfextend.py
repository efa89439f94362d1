"""SelfExtend: Full attention with true positions nearby and with positions in groups far away.

Stored: keys **before** RoPE, and values, of all tokens. With w = ``window`` and g = ``group_size``, a query at position i
sees the key at j as if the two stood at

    i, j                                     where i - j < w
    floor(i / g) + w - floor(w / g), floor(j / g)      elsewhere

under one softmax. A text of n tokens then has no distance above w + (n - w) / g, so a model that was trained for L tokens
can process (L - w) * g + w tokens. The paper's authors advise to stay below two thirds of L.

A chunk of a prompt attends in two parts, which are merged by their denominators. True positions: the slots that some window
of the chunk reaches, at most w - 1 and the chunk. Grouped positions: causal attention of a chunk that begins w
slots earlier. So a prompt costs about as much as Full's, and the window's attention besides.

**Source**: Jin et al., "LLM Maybe LongLM: Self-Extend LLM Context Window Without Tuning" (arXiv:2401.01325, section 3 and
algorithm 1); datamllab/LongLM cdbbb06.

**Departures**: ``window`` must be a multiple of ``group_size``; the released code mixes true and floored division where it is
not. Queries are not scaled by the logarithm of the length, which is off in the released code too.
"""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerCache, LayerSpec
from kvjax.cache.quantised import empty_resident
from kvjax.protocol.fields import known
from kvjax.protocol.method import Cost, Inputs, LayerMethod, free_slots
from kvjax.protocol.slots import cost_of_all
from kvjax.protocol.typing import pytree, static, traced
from kvjax.rope import rotate, rotate_stored
from pallas_kernels.attend.dense_attention import dense_attention
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.numerics import merge_pair


@pytree
class SelfExtend(LayerMethod):
    """True positions nearby, grouped positions far away; see the module docstring."""

    group_size: int | Array = traced("far tokens that share a position", default=8, least=1)
    window: int = static("newest tokens at true positions, whole groups", default=1024, least=1)

    PAPER: ClassVar[str] = "arXiv:2401.01325"
    chunk = 1024  # prompt tokens read at once; changes memory, not results

    extrapolates = True
    lacks = ()

    def check(self) -> None:
        group = known(self.group_size)
        if group is not None and (self.window % group).any():
            raise ValueError(f"SelfExtend: window must be a multiple of group_size={group}, got {self.window}")

    def init(self, spec: LayerSpec) -> LayerCache:
        slots = spec.prompt_slots + spec.max_new_tokens
        return empty_resident(spec, slots)

    def attend(self, state: LayerCache, inputs: Inputs) -> tuple[Array, LayerCache]:
        query, key, value, position, inv_freq = inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq
        if position.shape[1] > 1:
            cache = state.append(key, value, position, inputs.start)
            return self._attend(query, cache, position, inputs), cache
        # Angles of zero rotate nothing. The query goes through the kernel that stores the token, so XLA need not copy it.
        query, cache = state.append_rotated(query, key, value, position, jnp.zeros_like(inv_freq))
        return self._attend_one(query, cache, position, inputs), cache

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

    def _attend(self, query: Array, cache: LayerCache, position: Array, inputs: Inputs) -> Array:
        """Attend with queries [B, H, G, T, D] at ``position`` int32 [B, T], whose tokens are stored; 0 for padding."""
        key, value, start = cache.key, cache.value, inputs.start
        begin = jnp.maximum(position[:, 0], 0) if start is None else start  # the slot of the first query's token
        near = self._near(query, key, value, cache.position, position, begin, inputs)
        out, lse = merge_pair(*near, *self._grouped(query, key, value, position, begin, inputs))
        return with_sinks(out, lse, inputs.sinks)[0]

    def _near(
        self, query: Array, key: Array, value: Array, stored: Array, position: Array, begin: Array | int, inputs: Inputs
    ) -> tuple[Array, Array]:
        """Attend to the keys within the window of each query, at true angles: with the lse.

        Only the slots are read that some window reaches, which are consecutive.
        """
        tokens = position.shape[1]
        reach = 0 if isinstance(begin, int) else self.window - 1  # a whole prompt begins at 0
        size = min(tokens + reach, key.shape[2])
        first = jnp.clip(begin - self.window + 1, 0, key.shape[2] - size)
        key, value, stored = (_slots(x, first, size) for x in (key, value, stored))
        return dense_attention(
            rotate(query, position[:, None, None], inputs.inv_freq),
            rotate(key, stored, inputs.inv_freq),
            value,
            query_position=position,
            key_position=stored,
            query_first=position - self.window + 1,
            scale=1 / math.sqrt(query.shape[-1]),
        )

    def _grouped(
        self, query: Array, key: Array, value: Array, position: Array, begin: Array | int, inputs: Inputs
    ) -> tuple[Array, Array]:
        """Attend to the keys behind the window of each query, in groups: with the lse.

        The query in slot i sees slots 0 to i - window, as a chunk that begins ``window`` slots earlier would. In a chunk
        that would begin before slot 0, the first queries see nothing; they go to the end, where they count as padding.
        """
        tokens, slots = position.shape[1], key.shape[2]
        if tokens > slots:  # prefix_attention wants a slot for each token, padding included
            key, value = (jnp.pad(x, [(0, 0), (0, 0), (0, tokens - slots), (0, 0)]) for x in (key, value))
        step = jnp.arange(tokens, dtype=jnp.int32)[None]
        blind = jnp.broadcast_to(jnp.clip(self.window - begin, 0, tokens), position.shape[:1])[:, None]
        seeing = (step + blind) % tokens
        query = jnp.take_along_axis(query, seeing[:, None, None, :, None], axis=3)
        place = self._far(jnp.take_along_axis(position, seeing, axis=1))
        slot = jnp.arange(key.shape[2], dtype=jnp.int32)
        turn = rotate_stored if inputs.start is None else rotate
        out, lse = prefix_attention(
            rotate(query, place[:, None, None], inputs.inv_freq),
            turn(key, slot // self.group_size, inputs.inv_freq),
            value,
            start=0 if isinstance(begin, int) else jnp.maximum(begin - self.window, 0),
            length=jnp.maximum(jnp.sum(position >= 0, axis=1, dtype=jnp.int32) - blind[:, 0], 0),
            scale=1 / math.sqrt(query.shape[-1]),
        )
        back = ((step - blind) % tokens)[:, None, None]
        return jnp.take_along_axis(out, back[..., None], axis=3), jnp.take_along_axis(lse, back, axis=3)

    def _far(self, position: Array) -> Array:
        """Compute the position at which a query at ``position`` meets keys in groups."""
        return position // self.group_size + self.window - self.window // self.group_size


def _slots(store: Array, first: Array, size: int) -> Array:
    """Take ``size`` slots of [B, H, S, ...] from slot ``first`` int32 on, a scalar or [B]."""
    if first.ndim == 0:
        return lax.dynamic_slice_in_dim(store, first, size, 2)
    return jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, size, 1))(store, first)
