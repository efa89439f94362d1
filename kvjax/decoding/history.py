"""What a sampler remembers of each row: its tokens, how often each occurs, and the state of a processor of one's own."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.protocol.describe import at_once, is_known
from kvjax.protocol.typing import pytree, traced

_MULTIPLE = 256  # places are added in multiples of this, so that calls one after the other share a program


@pytree
class History:
    """The tokens of each row that a sampler counts: those that `Sampler.read` was given, and those that were drawn."""

    tokens: Array = traced("int32 [B, N], padding behind each row's tokens")
    drawn: Array = traced("bool [B, N], whether a token was drawn; the others were read")
    length: Array = traced("int32 [B], tokens of each row")

    @classmethod
    def empty(cls, batch: int) -> History:
        """Return a history of rows without tokens."""
        with at_once():
            tokens, length = jnp.zeros((batch, 0), jnp.int32), jnp.zeros((batch,), jnp.int32)
            return cls(tokens=tokens, drawn=tokens != 0, length=length)

    def read(self, tokens: Array, length: Array) -> History:
        """Append ``tokens`` int32 [B, T], of which ``length`` int32 [B] are real."""
        with at_once() if is_known(self, tokens, length) else contextlib.nullcontext():
            order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
            wide = self._wider(tokens.shape[1])
            place = jnp.where(order < length[:, None], self.length[:, None] + order, wide.tokens.shape[1])
            row = jnp.arange(len(tokens))[:, None]
            written = wide.tokens.at[row, place].set(tokens, mode="drop")
            return dataclasses.replace(wide, tokens=written, length=self.length + length)

    def with_room(self, steps: int) -> History:
        """Add places for ``steps`` more tokens of each row where there are too few."""
        if not is_known(self):
            return self._wider(steps)
        with at_once():
            needed = int(np.max(jax.device_get(self.length))) + steps
            missing = needed - self.tokens.shape[1]
            return self if missing <= 0 else self._wider(missing + -needed % _MULTIPLE)

    def _wider(self, count: int) -> History:
        tokens, drawn = (jnp.pad(x, ((0, 0), (0, count))) for x in (self.tokens, self.drawn))
        return dataclasses.replace(self, tokens=tokens, drawn=drawn)

    def places(self, only_drawn: bool, vocab_size: int) -> tuple[Array, Array]:
        """Return the rows, and the tokens int32 [B, N], where a place without a token has ``vocab_size``."""
        real = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None] < self.length[:, None]
        real = real & self.drawn if only_drawn else real
        return jnp.arange(len(self.tokens))[:, None], jnp.where(real, self.tokens, vocab_size)

    def closes_ngram(self, n: int, vocab_size: int) -> Array:
        """Mark the tokens that would end a sequence of ``n`` tokens that the row has already: bool [B, V]."""
        row, tokens = self.places(False, vocab_size)
        marked, starts = jnp.zeros((len(tokens), vocab_size), bool), tokens.shape[1] - n + 1
        if starts < 1:
            return marked
        same = jnp.ones((len(tokens), starts), bool)
        for at in range(n - 1):
            last = jnp.take_along_axis(tokens, jnp.maximum(self.length - (n - 1) + at, 0)[:, None], axis=1)
            same = same & (tokens[:, at : at + starts] == last)
        return marked.at[row, jnp.where(same, tokens[:, n - 1 :], vocab_size)].set(True, mode="drop")


@pytree
class Memory:
    """What a decoding loop carries for its sampler; outside of the loop nothing is counted."""

    history: History
    state: Any = None  # of the processor, every leaf with axis B first
    occurs: Array | None = None  # bool [B, V], tokens that were read or drawn
    counts: Array | None = None  # int32 [B, V], how often each token was drawn

    def add(self, tokens: Array, active: Array, state: Any) -> Memory:
        """Note a drawn token int32 [B] of the rows that are ``active`` bool [B], and the processor's new ``state``."""
        old, row = self.history, jnp.arange(len(tokens))
        place = jnp.where(active, old.length, old.tokens.shape[1])
        history = History(
            tokens=old.tokens.at[row, place].set(tokens, mode="drop"),
            drawn=old.drawn.at[row, place].set(True, mode="drop"),
            length=old.length + active.astype(jnp.int32),
        )

        def chosen(new: Array, old: Array) -> Array:
            return jnp.where(active.reshape(-1, *[1] * (old.ndim - 1)), new, old)

        return Memory(
            history=history,
            state=jax.tree.map(chosen, state, self.state),
            occurs=None if self.occurs is None else self.occurs.at[row, tokens].max(active),
            counts=None if self.counts is None else self.counts.at[row, tokens].add(active.astype(jnp.int32)),
        )

    def counted(self, vocab_size: int, occurs: bool, counts: bool) -> Memory:
        """Count the tokens of the history, or do not: which of ``occurs`` and ``counts`` there are."""
        batch = len(self.history.length)
        seen = jnp.zeros((batch, vocab_size), bool).at[self.history.places(False, vocab_size)] if occurs else None
        times = jnp.zeros((batch, vocab_size), jnp.int32).at[self.history.places(True, vocab_size)] if counts else None
        return Memory(
            history=self.history,
            state=self.state,
            occurs=None if seen is None else seen.set(True, mode="drop"),
            counts=None if times is None else times.add(1, mode="drop"),
        )

    def uncounted(self) -> Memory:
        """Leave the counts out: what is passed from call to call is small."""
        return Memory(history=self.history, state=self.state)
