"""What methods share that read the prompt again: texts and chunks of a second reading, and a budget of all heads together.

The model rereads the text behind the prompt's first ``num_sink`` tokens, in chunks of ``chunk`` tokens. Each is reread behind
the whole prompt, at the positions from the prompt's length on, and is not stored. A request to repeat comes first: ``ask``
and ``answer`` before the first chunk; ``ask_later``, the last ``overlap`` tokens of the previous chunk, and ``answer`` before
every later chunk. Source: as in `kvjax.methods.kvzip`.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core

from kvjax.cache import LayerCache
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.method import LayerMethod, Prompt, Reading
from kvjax.protocol.slots import SlotState, check_budget
from kvjax.protocol.typing import EMPTY, Model, method_layers, not_none, pytree, static, traced
from kvjax.selection import best_of_heads, compact, floor_share, top_slots
from pallas_kernels import axes
from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.numerics import bounded_loop, product_precision
from pallas_kernels.score.column_mass import column_mass

_TEXTS = {  # of the released code
    "ask": "\n\nRepeat the previous context exactly.",
    "ask_later": "\n\nRepeat the part of the previous context exactly, starting with ",
    "answer": "\n",
}


@pytree
class Rereading(AppendOnly):
    """Keep the prompt slots with the best scores of a second reading, over the heads of all layers."""

    budget: int | Array = traced("prompt slots kept per KV head, mean of layers", default=1024, least=1, within="capacity")
    capacity: int = static("the largest budget; None = budget", default=None, least=1)
    head_factor: float | tuple[float, ...] = static(
        "the most that one head keeps, as a multiple of the budget; or for each layer", default=2.0, above=0
    )
    layerwise: bool = static("whether the budget is the mean of each layer, not of all layers together", default=False)
    num_sink: int = static("first tokens, which are always kept and not reread", default=4, least=0)
    chunk: int = static("tokens that are reread at once", default=2000, least=1)
    ask: tuple[int, ...] = static("token ids before the first chunk", default=(), least=0, empty=True)
    ask_later: tuple[int, ...] = static("before every later chunk's overlap", default=(), least=0, empty=True)
    answer: tuple[int, ...] = static("token ids right before every chunk", default=(), least=0, empty=True)

    probes = False  # True: it reads `Inputs.written`, which not every model can give
    cuts: ClassVar[tuple[str, ...]] = ("budget", "capacity", "head_factor", "layerwise")  # knobs that change no score
    overlap = 8  # last tokens of a chunk that stand before the next one

    keeps = "`budget` tokens per KV head, mean over all layers' heads"
    evicts = True
    spans_layers = True

    def check(self) -> None:
        check_budget(self, self.num_sink + 1, f"num_sink={self.num_sink} first tokens and one more")

    def check_sizes(self, model: Model) -> None:
        runs = len(method_layers(model))
        if isinstance(self.head_factor, tuple) and {len(self.head_factor), runs} != {model.num_layers}:
            raise ValueError(
                f"{type(self).__name__}: head_factor must be one number, or one for each layer if all attend to the whole "
                f"context, got {len(self.head_factor)}; {runs} of the model's {model.num_layers} layers do"
            )
        if self.probes and not (can := getattr(model, "can_probe", False)):
            raise ValueError(
                f"{type(self).__name__} reads what attention writes: expected a model with can_probe = True, got "
                f"{type(model).__name__} with can_probe = {can}; KVzip with plus=False takes it"
            )
        worst = max((*self.ask, *self.ask_later, *self.answer), default=0)
        if worst >= model.vocab_size:
            who = type(self).__name__
            raise ValueError(f"{who}: ask, ask_later and answer must be below vocab_size={model.vocab_size}, got {worst}")

    @classmethod
    def tokenizer_knobs(cls, tokenizer: Any, vocab_size: int | None) -> dict[str, Any]:
        ids = {knob: tokenizer.encode(text, add_special_tokens=False) for knob, text in _TEXTS.items()}
        return {knob: tuple(x if isinstance(x, list) else x.ids) for knob, x in ids.items()}

    def reread_tokens(self, length: int) -> int:
        asked = max(len(self.ask), len(self.ask_later) + self.overlap) + len(self.answer)
        return asked + min(self.chunk, length - self.num_sink) if length > self.num_sink else 0

    @property
    def kind(self) -> Hashable:
        """What is equal for methods that share a second reading: see `Reading.once`."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in self.cuts]
        return type(self), *((name, vars(self)[name]) for name in names)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        own = self._factors(num_layers)[layer]
        return self if own == self.head_factor else dataclasses.replace(self, head_factor=own)

    def each_chunk[Carry](self, reading: Reading, read: Callable[[Array | int, int, Carry], Carry], carry: Carry) -> Carry:
        """Run ``read(index, size, carry)`` for each chunk of the prompt behind the first tokens."""
        rest = reading.tokens.shape[1] - self.num_sink
        size = min(self.chunk, rest)
        if rest <= self.chunk:
            return read(0, size, carry)
        longest = axes.most(jnp.max(reading.length), axes.DATA)
        count, most = -((self.num_sink - longest) // size), -(-rest // size)
        if not self.packs:  # scores choose, and a choice has no slope
            return lax.fori_loop(0, count, lambda index, given: read(index, size, given), carry)
        # A loop with a derivative closes over no traced array, so what `read` closes over becomes an argument.
        whole = jax.make_jaxpr(lambda index, given: read(index, size, given))(jnp.int32(0), carry)

        def body(index: Array, given: Carry, held: list[Array]) -> Carry:
            run = core.jaxpr_as_fun(whole.replace(consts=held))
            return jax.tree.unflatten(jax.tree.structure(given), run(index, *jax.tree.leaves(given)))

        return bounded_loop(body, most, count, carry, whole.consts)

    def raised(
        self,
        score: Array,
        cache: LayerCache,
        query: Array,
        lse: Array,
        position: Array,
        begin: Array | int,
        size: int,
        *,
        weight: Array | None = None,
        kernel: Array | None = None,
    ) -> Array:
        """Raise the scores float32 [B, H, S] of a chunk's tokens to the largest attention that each receives from any query.

        The softmax is over the first tokens, the chunk, and the tokens that are read up to the query's own.

        Args:
            query: [B, H, G, T, D], rotated, of the tokens at ``position`` int32 [B, T].
            lse: float32 [B, H, G, T], over the tokens that are read alone.
            begin: first token of the chunk of ``size`` tokens; the last chunk may reach into the one before.
            weight: float32 [B, T], a factor of each query's probabilities.
            kernel: [H, G, D, d], the output projection: a token counts times the norm of what its value writes.
        """
        start = jnp.minimum(begin, cache.num_slots - size)
        own, value, at = (lax.dynamic_slice_in_dim(x, start, size, 2) for x in (cache.key, cache.value, cache.position))
        at = jnp.where(at < begin, EMPTY, at)
        # The previous chunk's entries go to the end, so that the keys that are seen stand in front.
        seen = jnp.concatenate([cache.key[:, :, : self.num_sink], jnp.roll(own, start - begin, axis=2)], axis=2)
        count = jnp.sum(cache.position[:, 0, : self.num_sink] >= 0, axis=1) + jnp.sum(at[:, 0] >= 0, axis=1)
        scale = 1 / math.sqrt(query.shape[-1])
        _, stored = past_attention(query, seen, seen, count=count.astype(jnp.int32), scale=scale)
        lse = jnp.logaddexp(lse, stored)
        if weight is not None:
            lse = lse - jnp.log(weight)[:, None, None]
        shape = query.shape[:3]
        if kernel is not None:  # what a value writes differs in each query head
            query, lse = query.reshape(shape[0], -1, 1, *query.shape[3:]), lse.reshape(shape[0], -1, 1, lse.shape[3])
            own, at = jnp.repeat(own, shape[2], axis=1), jnp.repeat(at, shape[2], axis=1)
        most = column_mass(query, own, lse, query_position=position, key_position=at, scale=scale, reduce="max")
        if kernel is not None:
            most = jnp.max(most.reshape(*shape, size) * _written_norm(value, kernel), axis=2)
        most = jnp.maximum(lax.dynamic_slice_in_dim(score, start, size, 2), most)
        return lax.dynamic_update_slice_in_dim(score, most, start, 2)

    def marked(
        self, states: tuple[SlotState, ...], caches: tuple[LayerCache, ...], scores: tuple[Array, ...], asked: Any = None
    ) -> tuple[SlotState, ...]:
        """Write into each layer's record of the prompt which slots stay, by scores float32 [B, H, S], and its ``asked``."""
        layers = zip(caches, states, self.best(caches, scores), asked or (None,) * len(caches), strict=True)
        return tuple(
            SlotState(cache=cache, prompt=dataclasses.replace(not_none("prompt", state.prompt), kept=kept, asked=own))
            for cache, state, kept, own in layers
        )

    def kept(self, cache: LayerCache, prompt: Prompt) -> tuple[Array, Array]:
        """List the prompt slots that stay: int32 [B, H, K], ascending, and bool [B, H, K], True for those that count."""
        kept = prompt.kept
        if kept is None:  # not reread: a prompt of the first tokens alone
            kept = cache.valid & (cache.position < self.budget)
        return compact(kept, min(self.most, cache.num_slots))

    @property
    def most(self) -> int:
        """Slots that are allocated for the prompt of each head of a layer."""
        return self._bound(self._factors(1)[0], self.capacity)

    def _factors(self, layers: int) -> tuple[float, ...]:
        """List the factor of each layer."""
        return self.head_factor if isinstance(self.head_factor, tuple) else (self.head_factor,) * layers

    def _bound(self, factor: float, budget: Any) -> Any:
        """Compute the most slots that a head keeps: the first tokens and one more at least."""
        share = floor_share(factor, budget)
        return max(share, self.num_sink + 1) if isinstance(share, int) else jnp.maximum(share, self.num_sink + 1)

    def piece(self, reading: Reading, index: Array | int, size: int) -> tuple[Array, Array, Array]:
        """Build the tokens int32 [B, T] with which chunk ``index`` is reread.

        Returns:
            The tokens; how many are real, int32 [B]; and how many stand before the chunk, an int32 scalar.
        """
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
        return piece, jnp.where(real > 0, asked + real, 0), asked

    def best(self, caches: tuple[LayerCache, ...], scores: tuple[Array, ...]) -> list[Array]:
        """Select the slots of each layer that stay, bool [B, H, S], from scores float32 [B, H, S]."""
        capacity, budget = self.capacity, jnp.asarray(self.budget).astype(jnp.int32)
        found, values, factors = [], [], self._factors(len(caches))
        widest = min(self._bound(max(factors), capacity), caches[0].num_slots)
        for cache, score, factor in zip(caches, scores, factors, strict=True):
            score = jnp.where(cache.position < self.num_sink, jnp.inf, score)
            slots, held = top_slots(score, cache.valid, self._bound(factor, budget), widest)  # the candidates of each head
            found.append(slots)
            values.append(jnp.where(held, jnp.take_along_axis(score, slots, axis=2), -jnp.inf))
        chosen = best_of_heads(jnp.stack(values, axis=1), budget, capacity, layerwise=self.layerwise)
        empty = jnp.zeros(caches[0].position.shape, bool)
        row, head = jnp.arange(empty.shape[0])[:, None, None], jnp.arange(empty.shape[1])[None, :, None]
        return [empty.at[row, head, slots].max(chosen[:, layer]) for layer, slots in enumerate(found)]


def _written_norm(value: Array, kernel: Array) -> Array:
    """Compute the norm of what values [B, H, S, D] write through ``kernel`` [H, G, D, d]: float32 [B, H, G, S]."""
    exact = product_precision(jnp.float32)
    wide = kernel.astype(jnp.float32)
    square = jnp.einsum("hgim,hgjm->hgij", wide, wide, precision=exact)
    value = value.astype(jnp.float32)
    turned = jnp.einsum("bhsi,hgij->bhgsj", value, square, precision=exact)
    return jnp.sqrt(jnp.maximum(jnp.sum(turned * value[:, :, None], axis=4), 0))
