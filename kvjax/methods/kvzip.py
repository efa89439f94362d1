"""KVzip: read the prompt again, and keep the tokens that the model attends to when it has to repeat the prompt.

Stored after the prompt: ``budget`` slots per KV head, as the mean over all heads of all layers, and every later token. No
query is known, so one cache serves all later questions. A head keeps at most ``floor(head_factor * budget)`` slots. This
number is allocated for each head, because arrays have one length for all heads.

After the prefill of n tokens, the model rereads the text behind its first ``num_sink`` tokens, in chunks of C = ``chunk``
tokens. Each chunk is reread behind the whole prompt, at the positions from n on, and is not stored. A request to repeat comes
first: ``ask`` and ``answer`` before the first chunk; ``ask_later``, the last ``overlap`` tokens of the previous chunk, and
``answer`` before every later chunk. Score of token i of a chunk for KV head h::

    s[h, i] = max over queries t of this reading and query heads g of p_t,g[i]

where p_t,g is a softmax over the first ``num_sink`` tokens, the chunk's tokens where they are stored, and the tokens of this
reading up to t. The slots with the best scores of all heads and layers stay, whichever head they are in; with ``layerwise``,
each layer keeps the best of its own heads. The first ``num_sink`` tokens are always kept.

The second reading costs as much as the first or more: a chunk attends to the whole prompt.

**Source**: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (arXiv:2505.23416);
snu-mllab/KVzip 5d84729, level "pair", with its texts, chunk and overlap; NVIDIA/kvpress 8bb29b9, KVzipPress, for
``layerwise`` and 4 first tokens.

**Departures**: a head keeps at most ``head_factor`` times the budget; what it would keep beyond that goes to the other
heads. What other factors score: docs/notebook/readings-others.md. The released code stores heads of any length one behind
the other, and keeps the whole system prompt: set ``num_sink`` to its length. It gives a budget as a share of the prompt,
without the system prompt. The end of the user's turn in the model's chat template, which stands before what is repeated, is
``answer``: a tokenizer alone gives a line break, which kvpress takes where there is no template. The softmax is in float32.
Without a tokenizer the text is reread without a request.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import attend_behind
from kvjax.cache import LayerCache
from kvjax.methods.rereading import Rereading
from kvjax.protocol.method import Inputs, Prompt, Reading
from kvjax.protocol.slots import SlotState
from kvjax.protocol.typing import EMPTY, not_none, pytree
from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.score.column_mass import column_mass


@pytree
class KVzip(Rereading):
    """Keep what the model attends to when it repeats the prompt; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2505.23416"

    def reread(self, states: tuple[SlotState, ...], reading: Reading) -> tuple[SlotState, ...]:
        caches = tuple(state.cache.resident() for state in states)
        scores = tuple(jnp.zeros(cache.position.shape, jnp.float32) for cache in caches)

        def read(index: Array | int, size: int, scores: tuple) -> tuple:
            begin = self.num_sink + index * size
            start = jnp.minimum(begin, reading.tokens.shape[1] - size)  # the last chunk may reach into the one before

            def attend(state: tuple[LayerCache, Array], inputs: Inputs) -> tuple[Array, tuple]:
                cache, score = state
                query, key = inputs.rotated()
                out, lse, _ = attend_behind(query, key, inputs.value, cache, inputs.position, inputs.sinks)
                own, at, old = (lax.dynamic_slice_in_dim(x, start, size, 2) for x in (cache.key, cache.position, score))
                at = jnp.where(at < begin, EMPTY, at)
                # The previous chunk's entries go to the end, so that the keys that are seen stand in front.
                seen = jnp.concatenate([cache.key[:, :, : self.num_sink], jnp.roll(own, start - begin, axis=2)], axis=2)
                count = jnp.sum(cache.position[:, 0, : self.num_sink] >= 0, axis=1) + jnp.sum(at[:, 0] >= 0, axis=1)
                scale = 1 / math.sqrt(query.shape[-1])
                _, stored = past_attention(query, seen, seen, count=count.astype(jnp.int32), scale=scale)
                most = column_mass(
                    query, own, jnp.logaddexp(lse, stored), query_position=inputs.position, key_position=at, scale=scale,
                    reduce="max",
                )  # fmt: skip
                return out, (cache, lax.dynamic_update_slice_in_dim(score, jnp.maximum(old, most), start, 2))

            given = tuple(zip(caches, scores, strict=True))
            return tuple(score for _, score in reading.run(given, *self.piece(reading, index, size)[:2], attend))

        scores = self.each_chunk(reading, read, scores)
        prompts = (not_none("prompt", state.prompt) for state in states)
        told = zip(caches, prompts, self.best(caches, scores), strict=True)
        return tuple(SlotState(cache=x, prompt=dataclasses.replace(prompt, kept=kept)) for x, prompt, kept in told)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache.compact(*self.kept(cache, prompt), room), None
