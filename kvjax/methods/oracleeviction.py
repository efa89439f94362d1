"""OracleEviction: let Full answer first, and keep the prompt's tokens that its answer attends to most.

Stored after the prompt: the ``budget`` best slots of each KV head, and every later token. At the prompt's end the model
decodes ``ahead`` tokens greedily with every token in view. Then it reads them once more, behind the prompt, and nothing of
them is stored. With P their number up to an end of text, score of prompt token i for KV head h::

    s[h, i] = sum over the P tokens t and the query heads g of the score of `kvjax.methods.Oracle` by ``by``

where the softmax of token t is over the prompt and the answer's tokens up to t. Random draws one number for each slot.

No cache that is cut once, with the same number of slots in every head, is meant to answer better: what such methods lose
against this one is the price of not knowing the answer, and what this one loses against `Oracle` is the price of deciding
once. The answer is Full's own, so it is an oracle only if the question is in the prompt. It costs ``ahead`` passes over the
prompt's keys.

**Source**: Wang et al., "Lookahead Q-Cache: Achieving More Consistent KV Cache Eviction via Pseudo Query" (arXiv:2505.20334),
which also lets the model answer first and scores by the answer's queries.

**Departures**: in the paper a cut cache writes the first answer, of 8 tokens, because the paper wants a method that is cheap;
here Full does. Each token is chosen by its own score. The best set for a head is a search over sets, because values may
cancel out, and heads and layers depend on one another.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import attend_behind
from kvjax.cache import LayerCache
from kvjax.methods.oracle import READINGS, drawn, logits_of, worth
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.method import Inputs, Prompt, Reading
from kvjax.protocol.slots import SlotState
from kvjax.protocol.typing import not_none, pytree, static, traced
from kvjax.selection import compact, mask_of, top_slots
from pallas_kernels.dispatch import run_shared


@pytree
class OracleEviction(AppendOnly):
    """Keep what Full's answer attends to; see the module docstring."""

    budget: int | Array = traced("prompt slots kept per KV head", default=1024, least=1, within="capacity")
    capacity: int = static("slots allocated for them; None = budget", default=None, least=1)
    by: str = static('"attention", "output" error, or "random"', default="attention", choices=READINGS)
    ahead: int = static("tokens that Full decodes first", default=32, least=1)

    PAPER: ClassVar[str] = "arXiv:2505.20334"

    keeps = "`budget` tokens per KV head"
    evicts = True
    spans_layers = True
    lacks = ("sinks", "latent")

    def reread_tokens(self, length: int) -> int:
        return max(self.ahead, 2)

    def reread(self, states: tuple[SlotState, ...], reading: Reading) -> tuple[SlotState, ...]:
        caches = tuple(state.cache.resident() for state in states)

        def judge(cache: LayerCache, inputs: Inputs) -> tuple[Array, Array]:
            query, key = inputs.rotated()
            out, later, (_, stored) = run_shared(attend_behind, query, key, inputs.value, cache, inputs.position)
            lses = jnp.logaddexp(stored, later)

            def add(score: Array, at: Array) -> tuple[Array, None]:
                one, lse, mean, real = (
                    lax.dynamic_index_in_dim(x, at, axis, keepdims=False)
                    for x, axis in ((query, 3), (lses, 3), (out, 3), (inputs.position, 1))
                )
                logits = logits_of(one, cache.key, cache.valid)
                own = worth(self.by, logits, cache.value, cache.valid, lse, mean).sum(axis=2)
                return score + jnp.where((real >= 0)[:, None, None], own, 0), None

            start = jnp.zeros(cache.position.shape, jnp.float32)
            if self.by == "random":
                return out, drawn(cache.position, reading.length[:, None])
            return out, lax.scan(add, start, jnp.arange(query.shape[3], dtype=jnp.int32))[0]

        def find() -> tuple[Array, ...]:
            return reading.apply(caches, *self._decoded(caches, reading), judge)[0]

        scores = reading.once((type(self), self.by, self.ahead), states, find)
        kept = []
        for cache, score in zip(caches, scores, strict=True):
            slots, listed = top_slots(score, cache.valid, self.budget, self.capacity)
            kept.append(mask_of(slots, listed, cache.num_slots))
        prompts = [not_none("prompt", state.prompt) for state in states]
        held = zip(caches, prompts, kept, strict=True)
        return tuple(SlotState(cache=x, prompt=dataclasses.replace(prompt, kept=own)) for x, prompt, own in held)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        kept = prompt.kept
        if kept is None:  # a cache of shapes alone
            kept = cache.valid & (cache.position < self.budget)
        slots, keep = compact(kept, min(self.capacity, cache.num_slots))
        return cache.compact(slots, keep, room), None

    def _decoded(self, caches: tuple[LayerCache, ...], reading: Reading) -> tuple[Array, Array]:
        """Decode Full's answer greedily: int32 [B, N], and how many of its tokens come before its end, at least 1."""

        def look(cache: LayerCache, inputs: Inputs) -> tuple[Array, Any]:
            query, key = inputs.rotated()
            return run_shared(attend_behind, query, key, inputs.value, cache, inputs.position)[0], cache

        def follow(at: Array, answer: Array) -> Array:
            count = jnp.full(reading.length.shape, at, jnp.int32)
            _, logits = reading.apply(caches, answer, count, look)
            return lax.dynamic_update_slice_in_dim(answer, likeliest(logits), at, 1)

        def likeliest(logits: Array) -> Array:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)[:, None]

        answer = jnp.zeros((len(reading.length), self.ahead), jnp.int32)
        answer = lax.dynamic_update_slice_in_dim(answer, likeliest(reading.logits), 0, 1)
        answer = lax.fori_loop(1, self.ahead, follow, answer)
        ended = jnp.zeros(answer.shape, bool)
        for token in reading.eos_token_ids:
            ended = ended | (answer == token)
        count = jnp.sum(jnp.cumsum(ended, axis=1) == 0, axis=1, dtype=jnp.int32)
        return answer, jnp.maximum(count, 1)
