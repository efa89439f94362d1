"""SentenceKV: keep the tokens that the prompt's end attends to; then attend to the sentences most like the open sentence.

Stored after the prompt: ``floor(keep_factor * budget)`` prompt slots per head, chosen as in `SnapKV`, and every later token;
the sentence of each slot; the mean of the stored rotated keys of each sentence; the sum of the rotated queries of the open
sentence, which is the sentence that is being written.

Score of sentence s for KV head h, where c is the number of tokens in the open sentence so far, the current token included::

    u[h, s] = mean over the group and those c tokens of q  .  mean over the stored tokens of s of k

A step takes sentences from the best on, and the tokens of each sentence in order, until the budget is full; the last sentence
is cut. The first ``num_sink`` and the last ``num_recent`` stored tokens are always taken and count in the budget. A step
whose token ends a sentence attends to all stored tokens.

**Source**: Zhu et al., "SentenceKV: Efficient LLM Inference via Sentence-Level Semantic KV Caching" (arXiv:2504.00970,
section 4 and Algorithm 1); zzbright1998/SentenceKV d6bb131 for details that the paper does not give: max-pooling,
32 sink and 32 recent tokens within the budget, and the steps that attend to all tokens.

**Departures**: the sinks are slots 0 to ``num_sink - 1``; the code also skips the slot after them, which is not skipped
here. Equal scores are common, because max-pooling repeats a score over its window; of tokens that tie at the cut, the lowest
slots are kept, and in the code PyTorch's ``topk`` decides. The code limits the slots that a sentence can contribute, and
drops a generated sentence above that limit; here only the budget is a limit. The last tokens of the prompt are a sentence,
which ends with the prompt. Tokens of an `extend` count as written text.

The pool is chosen once, so a question that comes later by `extend` finds what the prompt's last queries have left, and its
own tokens count as the open sentence. A ``keep_factor`` that keeps every token of the prompt finds what a later question
asks for: the cache is larger, a step reads as many tokens.

By default all heads keep the same prompt tokens, as in the paper's text, and their votes are pooled over 31 tokens, which
is our choice; `RELEASED` has the code's pooling and its nearest pool. What each reading of the paper scores:
docs/notebook/readings-others.md.
"""

import math
import types
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.cache.divided import whole
from kvjax.cache.offload import Near
from kvjax.methods.budgets import scaled
from kvjax.methods.sentencekv.boundaries import boundary_table
from kvjax.protocol.fields import number, shown
from kvjax.protocol.method import LayerMethod, Prompt, Step
from kvjax.protocol.observation import window_votes
from kvjax.protocol.slots import Reads, SlotMethod, check_budget
from kvjax.protocol.typing import EMPTY, pytree, static, traced
from kvjax.selection import smooth, top_slots
from pallas_kernels import axes
from pallas_kernels.choose.sentencekv.sentence_cut import CLOSES, JOINS, Rules, bounds, sentence_cut
from pallas_kernels.host import Rows
from pallas_kernels.store.sentencekv.sentence_add import sentence_add

# The released code's pool and pooling, as far as they are offered: `SentenceKV(**RELEASED)`.
RELEASED: Mapping[str, Any] = types.MappingProxyType({"prefilter": "kv_head", "kernel": 7})


@pytree
class Sentences:
    """The sentences of each head, numbered in slot order. Sentence ``count`` is the open sentence, without a mean yet."""

    sentence: Array  # int32 [B, H, S], the sentence of each slot, EMPTY for empty slots
    mean: Array  # [B, H, S, D] in the dtype of the keys, mean key of each finished sentence
    count: Array  # int32 [B, H], finished sentences
    query_sum: Array  # float32 [B, H, G, D], rotated queries summed over the open sentence
    key_sum: Array  # float32 [B, H, D], rotated keys summed over the open sentence
    length: Array  # int32 [B, H], tokens of the open sentence, the same in every head of a row


@pytree
class SentenceKV(SlotMethod):
    """Retrieval of sentences from a compressed prompt; see the module docstring."""

    budget: int | Array = traced("tokens attended per head, all included", default=1024, least=1, within="capacity")
    capacity: int = static("largest budget; None = budget", default=None, least=1)
    keep_factor: float = static("prompt tokens to keep, as a multiple of budget", default=2.0, least=1)
    boundary: Any = traced("bool [V], whether a token ends a sentence, see `boundary_table` in `boundaries.py`", default=None)
    prefilter: str = static(
        'prompt tokens are chosen per "kv_head", or "global": the same in all heads',
        default="global",
        choices=("kv_head", "global"),
    )
    kernel: int = static("max-pooling of the votes over neighbouring tokens", default=31, least=1, odd=True)
    num_sink: int = static("first stored tokens, always attended", default=32, least=0)
    num_recent: int = static("last stored tokens, always attended", default=32, least=1)
    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2504.00970"
    obs_window = 32  # last prompt tokens, which vote and are always kept
    open_cap = 256  # most tokens of the open sentence that are always attended
    keeps = "`keep_factor` x `budget` tokens per KV head"
    evicts = True
    slot_block = 1
    reads = Reads(tokens=True)

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        share, note = scaled(2 * 1024, length)  # it keeps twice its budget
        # 32 sink and 32 recent tokens are always kept: a smaller budget would leave nothing to choose.
        return {"budget": max(int(1024 * share), 80), "keep_factor": 2.0}, note

    def check(self) -> None:
        if self.boundary is not None:
            self._table()
        fixed = f"num_sink={self.num_sink} and num_recent={self.num_recent} tokens and one more"
        check_budget(self, self.num_sink + self.num_recent + 1, fixed)
        budget = number(self.budget)
        kept = self._pool if budget is None else _product(self.keep_factor, budget)
        if kept < self.obs_window:
            raise ValueError(
                f"SentenceKV: keep_factor * budget must be at least obs_window={self.obs_window}, got {self.keep_factor} * "
                f"{budget} = {kept}"
            )

    @property
    def _pool(self) -> int:
        """The prompt slots that are allocated per head."""
        return _product(self.keep_factor, self.capacity)

    def near(self, slots: int, room: int) -> Near:
        return Near(first=self.num_sink, newest=max(self.num_recent, self.open_cap))

    @classmethod
    def tokenizer_knobs(cls, tokenizer: Any, vocab_size: int | None) -> dict[str, Any]:
        size = 1 + max(tokenizer.get_vocab().values()) if vocab_size is None else vocab_size
        return {"boundary": boundary_table(tokenizer, size)}

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        self._table()
        return self

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Sentences]:
        votes = window_votes(cache, prompt)
        batch, heads, group, num_slots = votes.shape
        # The prompt is whole, so a slot is the position of its token.
        ends = self._ends(prompt.tokens).astype(jnp.int32)
        sentence = jnp.cumsum(ends, axis=1) - ends
        if self.prefilter == "kv_head":
            votes = votes.sum(axis=2)
        else:
            votes = axes.total(votes.sum(axis=(1, 2)))
            votes = jnp.broadcast_to(votes[:, None], (batch, heads, num_slots))
        start = prompt.query_position.max(axis=1) + 1 - self.obs_window
        at = whole(cache.position, cache)
        recent = at >= start[:, None, None]
        pooled = smooth(jnp.where((at >= 0) & ~recent, votes, -jnp.inf), self.kernel, "max")
        kept = jnp.floor(jnp.asarray(self.keep_factor, jnp.float32) * jnp.asarray(self.budget, jnp.float32))
        score = jnp.where(recent, jnp.inf, pooled)
        slots, keep = top_slots(score, at >= 0, kept.astype(jnp.int32), self._pool)
        cache = cache.compact(slots, keep, room)
        sentence = jnp.take_along_axis(jnp.broadcast_to(sentence[:, None], (batch, heads, num_slots)), slots, axis=2)
        return cache, _index(cache, jnp.where(keep, sentence, EMPTY), group)

    def select(self, cache: LayerStorage, aux: Sentences, step: Step) -> Selection:
        """Select the best sentences, and the step's own token, in none before `update`, as a recent token or with all."""
        slots, listed = sentence_cut(
            None,
            aux.sentence,
            cache.position,
            aux.count,
            aux.length,
            cache.cursor,
            self._events(step)[:, 0],
            self.budget,
            rules=self._rules,
            query=step.query[..., 0, :],
            vector=aux.mean,
            added=aux.query_sum,  # the queries of the open sentence ask too; a sum ranks as a mean, rounded less
        )
        return Selection(slots=slots, mask=listed)

    def update(self, cache: LayerStorage, aux: Sentences, step: Step, mass: Array | None) -> tuple[LayerStorage, Sentences]:
        tokens, event = step.position.shape[1], self._events(step)
        if tokens == 1:
            return cache, _absorb(cache.newest_key, aux, step.query[..., 0, :], cache.cursor, event[:, 0])
        start = cache.cursor - jnp.sum(step.position >= 0, axis=1, dtype=jnp.int32)

        def absorb(at: Array, aux: Sentences) -> Sentences:
            return _absorb((cache.key, cache.rows), aux, step.query[..., at, :], start + at + 1, event[:, at])

        return cache, lax.fori_loop(0, tokens, absorb, aux)

    def count(self, cache: LayerStorage, aux: Sentences, shared: Any) -> tuple[Array, Array]:
        """Count for a step that continues the open sentence, or begins a sentence if none is open."""
        cursor, budget = (jnp.broadcast_to(x, aux.length.shape) for x in (cache.cursor[:, None], jnp.asarray(self.budget)))
        high, space = bounds(cursor, jnp.maximum(aux.length, 1), budget, self._rules)
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        inside = (slot >= self.num_sink) & (slot < high[..., None])
        finished = (aux.sentence >= 0) & (aux.sentence < aux.count[..., None])
        groups = cache.valid, cache.valid & ~inside, cache.valid & inside & finished
        stored, always, more = (jnp.sum(x, axis=2, dtype=jnp.int32) for x in groups)
        attended = always + jnp.minimum(more, space)
        row = aux.mean.shape[-1] * aux.mean.dtype.itemsize
        return attended, (aux.count * row + stored * aux.sentence.dtype.itemsize).astype(jnp.float32)

    def counters(self, aux: Sentences, shared: Any) -> dict[str, Array]:
        return {"sentences": aux.count.astype(jnp.float32).mean(axis=1)}

    def _table(self) -> Array | np.ndarray:
        """Check and return the boundary table."""
        if self.boundary is None:
            raise ValueError(
                "SentenceKV: boundary must be a bool array [V] (whether each token ends a sentence), got None; "
                'kvjax.make("sentencekv", tokenizer=model.tokenizer) makes it from a tokenizer'
            )
        table = self.boundary
        if not isinstance(table, (np.ndarray, jax.Array)) or table.dtype != bool or table.ndim != 1:
            raise ValueError(f"SentenceKV: boundary must be a bool array [V], got {shown(table)}")
        return table

    def _ends(self, tokens: Array) -> Array:
        """Mark the tokens that end a sentence, bool [B, T], from ids int32 [B, T]; unknown ids do not."""
        return jnp.asarray(self._table()).at[tokens].get(mode="fill", fill_value=False)

    def _events(self, step: Step) -> Array:
        """Compute the effect of each token of a step on the open sentence, int32 [B, T]: 0, `JOINS` or `CLOSES`."""
        ends = self._ends(step.tokens)
        return jnp.where(step.position < 0, 0, jnp.where(ends, CLOSES, JOINS))

    @property
    def _rules(self) -> Rules:
        return Rules(sinks=self.num_sink, recent=self.num_recent, open_cap=self.open_cap, whole=0)


def _product(factor: float, budget: int) -> int:
    """Compute ``floor(factor * budget)`` as `SentenceKV.compress` does from traced values, in float32."""
    return math.floor(np.float32(factor) * np.float32(budget))


def _index(cache: LayerCache, label: Array, group: int) -> Sentences:
    """Build the sentences of a compressed prompt.

    Args:
        label: int32 [B, H, K], a number that grows from sentence to sentence, for the first K slots; EMPTY for no token.
    """
    batch, heads, num_slots, dim = cache.key.shape
    size = label.shape[2]
    before = jnp.concatenate([jnp.full((batch, heads, 1), EMPTY, jnp.int32), label[..., :-1]], axis=2)
    new = (label >= 0) & (label != before)
    number = jnp.where(label >= 0, jnp.cumsum(new, axis=2, dtype=jnp.int32) - 1, EMPTY)
    count = jnp.sum(new, axis=2, dtype=jnp.int32)
    b, h = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    slot = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None, None], label.shape)
    # First slot of each sentence.
    first = jnp.broadcast_to(cache.cursor[:, None, None], (batch, heads, num_slots + 1))
    first = first.at[b, h, jnp.where(new, number, num_slots + 1)].set(slot, mode="drop")

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.where(right[1], right[0], left[0] + right[0]), left[1] | right[1]

    # A running sum that starts again with each sentence. A scatter could add in another order each time.
    key = jnp.where((label >= 0)[..., None], cache.key[:, :, :size], 0).astype(jnp.float32)
    total, _ = lax.associative_scan(join, (key, new[..., None]), axis=2)
    last = jnp.clip(first[..., 1:] - 1, 0, size - 1)
    tokens = jnp.maximum(first[..., 1:] - first[..., :-1], 1).astype(jnp.float32)
    mean = jnp.take_along_axis(total, last[..., None], axis=2) / tokens[..., None]
    finished = jnp.arange(num_slots)[None, None] < count[..., None]
    return Sentences(
        sentence=jnp.pad(number, ((0, 0), (0, 0), (0, num_slots - size)), constant_values=EMPTY),
        mean=jnp.where(finished[..., None], mean, 0).astype(cache.key.dtype),
        count=count,
        query_sum=jnp.zeros((batch, heads, group, dim), jnp.float32),
        key_sum=jnp.zeros((batch, heads, dim), jnp.float32),
        length=jnp.zeros((batch, heads), jnp.int32),
    )


def _absorb(keys: tuple[Array, Rows | None], aux: Sentences, query: Array, cursor: Array, event: Array) -> Sentences:
    """Add the token in the slot before ``cursor`` int32 [B], with rotated query [B, H, G, D], to the open sentence.

    ``keys`` are ``key`` and ``rows`` of the cache.
    """
    state = aux.sentence, aux.mean, aux.count, aux.query_sum, aux.key_sum, aux.length
    key, rows = keys
    sentence, mean, count, query_sum, key_sum, length = sentence_add(key, query, cursor, event, state, rows=rows)
    return Sentences(sentence=sentence, mean=mean, count=count, query_sum=query_sum, key_sum=key_sum, length=length)
