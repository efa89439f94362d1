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
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import attend_behind
from kvjax.cache import LayerCache
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.method import Inputs, Prompt, Reading
from kvjax.protocol.slots import SlotState, check_budget
from kvjax.protocol.typing import EMPTY, Model, not_none, pytree, static, traced
from kvjax.selection import best_of_heads, compact, floor_share, top_slots
from pallas_kernels import axes
from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.score.column_mass import column_mass

_TEXTS = {  # of the released code
    "ask": "\n\nRepeat the previous context exactly.",
    "ask_later": "\n\nRepeat the part of the previous context exactly, starting with ",
    "answer": "\n",
}


@pytree
class KVzip(AppendOnly):
    """Keep what the model attends to when it repeats the prompt; see the module docstring."""

    budget: int | Array = traced("prompt slots kept per KV head, mean of layers", default=1024, least=1, within="capacity")
    capacity: int = static("the largest budget; None = budget", default=None, least=1)
    head_factor: float = static("the most that one head keeps, as a multiple of the budget", default=2.0, least=1)
    layerwise: bool = static("whether the budget is the mean of each layer, not of all layers together", default=False)
    num_sink: int = static("first tokens, which are always kept and not reread", default=4, least=0)
    chunk: int = static("tokens that are reread at once", default=2000, least=1)
    ask: tuple[int, ...] = static("token ids before the first chunk", default=(), least=0, empty=True)
    ask_later: tuple[int, ...] = static("before every later chunk's overlap", default=(), least=0, empty=True)
    answer: tuple[int, ...] = static("token ids right before every chunk", default=(), least=0, empty=True)

    PAPER: ClassVar[str] = "arXiv:2505.23416"
    overlap = 8  # last tokens of a chunk that stand before the next one

    keeps = "`budget` tokens per KV head, mean over all layers' heads"
    evicts = True
    spans_layers = True

    def check(self) -> None:
        check_budget(self, self.num_sink + 1, f"num_sink={self.num_sink} first tokens and one more")

    def check_sizes(self, model: Model) -> None:
        worst = max((*self.ask, *self.ask_later, *self.answer), default=0)
        if worst >= model.vocab_size:
            raise ValueError(f"KVzip: ask, ask_later and answer must be below vocab_size={model.vocab_size}, got {worst}")

    @classmethod
    def tokenizer_knobs(cls, tokenizer: Any, vocab_size: int | None) -> dict[str, Any]:
        ids = {knob: tokenizer.encode(text, add_special_tokens=False) for knob, text in _TEXTS.items()}
        return {knob: tuple(x if isinstance(x, list) else x.ids) for knob, x in ids.items()}

    def reread_tokens(self, length: int) -> int:
        asked = max(len(self.ask), len(self.ask_later) + self.overlap) + len(self.answer)
        return asked + min(self.chunk, length - self.num_sink) if length > self.num_sink else 0

    def reread(self, states: tuple[SlotState, ...], reading: Reading) -> tuple[SlotState, ...]:
        caches = tuple(state.cache.resident() for state in states)
        scores = tuple(jnp.zeros(cache.position.shape, jnp.float32) for cache in caches)
        rest = reading.tokens.shape[1] - self.num_sink
        size = min(self.chunk, rest)

        def read(index: Array | int, scores: tuple) -> tuple:
            begin = self.num_sink + index * size
            start = jnp.minimum(begin, self.num_sink + rest - size)  # the last chunk may reach into the one before

            def attend(state: tuple[LayerCache, Array], inputs: Inputs) -> tuple[Array, tuple]:
                cache, score = state
                query, key = inputs.rotated()
                out, lse = attend_behind(query, key, inputs.value, cache, inputs.position, inputs.sinks)
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
            return tuple(score for _, score in reading.run(given, *self._piece(reading, index, size), attend))

        if rest <= self.chunk:
            scores = read(0, scores)
        else:
            longest = axes.most(jnp.max(reading.length), axes.DATA)
            scores = lax.fori_loop(0, -((self.num_sink - longest) // size), read, scores)
        prompts = (not_none("prompt", state.prompt) for state in states)
        told = zip(caches, prompts, self._best(caches, scores), strict=True)
        return tuple(SlotState(cache=x, prompt=dataclasses.replace(prompt, kept=kept)) for x, prompt, kept in told)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        kept = prompt.kept
        if kept is None:  # not reread: a prompt of the first tokens alone
            kept = cache.valid & (cache.position < self.budget)
        slots, keep = compact(kept, min(self._most, cache.num_slots))
        return cache.compact(slots, keep, room), None

    @property
    def _most(self) -> int:
        """Slots that are allocated for the prompt of each head."""
        return floor_share(self.head_factor, self.capacity)

    def _piece(self, reading: Reading, index: Array | int, size: int) -> tuple[Array, Array]:
        """Build the tokens int32 [B, T] with which chunk ``index`` is reread, and count the real ones, int32 [B]."""
        begin = self.num_sink + index * size
        padded = jnp.pad(reading.tokens, ((0, 0), (0, size)))

        def ids(*knobs: tuple[int, ...]) -> Array:
            return jnp.broadcast_to(jnp.asarray(sum(knobs, ()), jnp.int32)[None], (len(padded), sum(map(len, knobs))))

        def text(first: Array | int, count: int) -> Array:
            return lax.dynamic_slice_in_dim(padded, first, count, 1)

        own, last = text(begin, size), min(self.overlap, size)
        piece = jnp.concatenate([ids(self.ask, self.answer), own], axis=1)
        asked = jnp.int32(piece.shape[1] - size)
        if not isinstance(index, int):
            later = jnp.concatenate([ids(self.ask_later), text(begin - last, last), ids(self.answer), own], axis=1)
            width, first = max(piece.shape[1], later.shape[1]), index == 0
            one, other = (jnp.pad(x, ((0, 0), (0, width - x.shape[1]))) for x in (piece, later))
            piece, asked = jnp.where(first, one, other), jnp.where(first, asked, later.shape[1] - size)
        real = jnp.clip(reading.length - begin, 0, size)
        return piece, jnp.where(real > 0, asked + real, 0)

    def _best(self, caches: tuple[LayerCache, ...], scores: tuple[Array, ...]) -> list[Array]:
        """Select the slots of each layer that stay, bool [B, H, S], from scores float32 [B, H, S]."""
        capacity, budget = self.capacity, jnp.asarray(self.budget).astype(jnp.int32)
        most, each = min(self._most, caches[0].num_slots), floor_share(self.head_factor, budget)
        found, values = [], []
        for cache, score in zip(caches, scores, strict=True):
            score = jnp.where(cache.position < self.num_sink, jnp.inf, score)
            slots, held = top_slots(score, cache.valid, each, most)  # the candidates of each head
            found.append(slots)
            values.append(jnp.where(held, jnp.take_along_axis(score, slots, axis=2), -jnp.inf))
        chosen = best_of_heads(jnp.stack(values, axis=1), budget, capacity, layerwise=self.layerwise)
        empty = jnp.zeros(caches[0].position.shape, bool)
        row, head = jnp.arange(empty.shape[0])[:, None, None], jnp.arange(empty.shape[1])[None, :, None]
        return [empty.at[row, head, slots].max(chosen[:, layer]) for layer, slots in enumerate(found)]
