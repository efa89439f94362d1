"""KVzip: read the prompt again, and keep the tokens that the model attends to when it has to repeat the prompt.

Stored after the prompt: ``budget`` slots per KV head, as the mean over all heads of all layers, and every later token. No
query is known, so one cache serves all later questions. A head keeps at most ``floor(head_factor * budget)`` slots, which are
allocated for each head of a layer, because arrays have one length for all heads. The few heads that retrieve want several
times the budget, so ``head_factor`` may have a number for each layer: ``python -m experiments.heads.kept`` measures it.

After the prefill of n tokens, the model rereads the text behind its first ``num_sink`` tokens, in chunks of C = ``chunk``
tokens. Each chunk is reread behind the whole prompt, at the positions from n on, and is not stored. A request to repeat comes
first: ``ask`` and ``answer`` before the first chunk; ``ask_later``, the last ``overlap`` tokens of the previous chunk, and
``answer`` before every later chunk. Score of token i of a chunk for KV head h::

    s[h, i] = max over queries t of this reading and query heads g of p_t,g[i]

where p_t,g is a softmax over the first ``num_sink`` tokens, the chunk's tokens where they are stored, and the tokens of this
reading up to t. The slots with the best scores of all heads and layers stay, whichever head they are in; with ``layerwise``,
each layer keeps the best of its own heads. The first ``num_sink`` tokens are always kept. With ``plus`` (KVzip+) p_t,g[i] is
multiplied by |v_i W_g|, the norm of what the value writes through the output projection of query head g, and divided by the
norm of token t's input to the layer's attention.

The second reading costs as much as the first or more: a chunk attends to the whole prompt.

**Source**: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (arXiv:2505.23416);
snu-mllab/KVzip 5d84729, level "pair", with its texts, chunk and overlap; NVIDIA/kvpress 8bb29b9, KVzipPress, for
``layerwise`` and 4 first tokens, and of kvpress 0.5.5 ``kvzip_plus_normalization``.

**Departures**: a head keeps at most ``head_factor`` times the budget; what it would keep beyond that goes to the other
heads. What other factors score: docs/notebook/readings-others.md. The released code stores heads of any length one behind
the other, and keeps the whole system prompt: set ``num_sink`` to its length. It gives a budget as a share of the prompt,
without the system prompt. The end of the user's turn in the model's chat template, which stands before what is repeated, is
``answer``: a tokenizer alone gives a line break, which kvpress takes where there is no template. The softmax is in float32.
Without a tokenizer the text is reread without a request.
"""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import attend_behind
from kvjax.cache import LayerCache
from kvjax.methods.rereading import Rereading
from kvjax.protocol.method import Inputs, Prompt, Reading
from kvjax.protocol.slots import SlotState
from kvjax.protocol.typing import not_none, pytree, static
from pallas_kernels.dispatch import run_shared


@pytree
class KVzip(Rereading):
    """Keep what the model attends to when it repeats the prompt; see the module docstring."""

    plus: bool = static("whether weights count what their values write: KVzip+", default=False)

    PAPER: ClassVar[str] = "arXiv:2505.23416"

    @property
    def probes(self) -> bool:
        return self.plus

    def reread(self, states: tuple[SlotState, ...], reading: Reading) -> tuple[SlotState, ...]:
        caches = tuple(state.cache.resident() for state in states)
        none = tuple(jnp.zeros(cache.position.shape, jnp.float32) for cache in caches)

        def read(index: Array | int, size: int, scores: tuple) -> tuple:
            begin = self.num_sink + index * size

            def attend(state: tuple[LayerCache, Array], inputs: Inputs) -> tuple[Array, tuple]:
                cache, score = state
                query, key = inputs.rotated()
                out, lse, _ = run_shared(attend_behind, query, key, inputs.value, cache, inputs.position, inputs.sinks)
                written = {}
                if self.plus:
                    hidden, kernel = not_none("written", inputs.written)
                    written = {"weight": 1 / jnp.linalg.norm(hidden.astype(jnp.float32), axis=2), "kernel": kernel}
                given = score, cache, query, lse, inputs.position, begin, size
                return out, (cache, run_shared(type(self).raised, self, *given, **written))

            given = tuple(zip(caches, scores, strict=True))
            nudges = [jnp.zeros((), cache.key.dtype) for cache in caches] if self.plus else None
            read, _ = reading.apply(given, *self.piece(reading, index, size)[:2], attend, nudges)
            return tuple(score for _, score in read)

        scores = reading.once(self.kind, states, lambda: self.each_chunk(reading, read, none))
        return self.marked(states, caches, scores)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache.compact(*self.kept(cache, prompt), room), None
