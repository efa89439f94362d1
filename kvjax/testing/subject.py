"""A method under test, with its runs that several laws use; each run is made once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.api.generate import Generation, extend, generate
from kvjax.api.prefill import prefill
from kvjax.cache import Cache
from kvjax.protocol.method import LayerMethod, Method
from kvjax.protocol.typing import Model
from kvjax.testing.layer import Drive, drive, random_tokens

LENGTHS = np.array([40, 23, 9, 13])  # prompt tokens of the rows of one layer
LAYER_STEPS = 10  # decode steps after the prompts
STEPS = 10  # tokens that the model generates
ROOM = 24  # tokens for which the model's caches have room
WIDTH = 48  # columns of the model's prompts
QUESTIONS = ((5, 9, 2, 7), (8,), ())


class Subject:
    """A method under test.

    Args:
        method: at a small setting, which leaves something out of prompts of 40 tokens.
        model: a tiny model.
        params: of the model.
        full: the subject of `kvjax.methods.Full` and the same model; None if this is it.
        everything: the method with room for everything in prompts of 64 tokens; None if there is no such setting.
        nearby: the method with another value of a traced knob; None has none.
        traces: a list that gets longer whenever the model is traced.
        prompts: token ids of three rows.
        copies: how often a row alone is in its batch. None: as often as there are prompts, which needs no programs for
            another batch size. Few programs are also why fewer tokens are a limit everywhere here.
        rows: q [B, H, G, T, D], k and v [B, H, T, D] of one layer, the last `LAYER_STEPS` tokens after the prompt; None takes
            `tokens_of_layer`.
        lengths: int [B], tokens of the rows' prompts, from 1 to T - `LAYER_STEPS`.
    """

    def __init__(
        self,
        method: Method,
        model: Model,
        params: Any,
        *,
        full: Subject | None = None,
        everything: Method | None = None,
        nearby: Method | None = None,
        traces: Sequence[Any] = (),
        prompts: Sequence[Sequence[int]] = (),
        copies: int | None = None,
        rows: tuple[np.ndarray, ...] | None = None,
        lengths: np.ndarray = LENGTHS,
    ) -> None:
        self.method, self.model, self.params, self.everything = method, model, params, everything
        self.nearby = method if nearby is None else nearby
        self.full = self if full is None else full
        self.traces, self.prompts = traces, prompts or random_prompts()
        self._copies = len(self.prompts) if copies is None else copies
        self.rows, self.lengths = tokens_of_layer() if rows is None else rows, lengths

    def read(self, method: Method | None = None, rows: Sequence[Sequence[int]] | None = None, **options: Any) -> Cache:
        """Prefill ``rows`` (None: the three prompts), padded to one width.

        Args:
            method: None takes the subject's method.
            rows: token ids.
            **options: options of `kvjax.prefill`; also ``params``.
        """
        tokens, lengths = padded(self.prompts if rows is None else rows)
        given = {"config": self.model, "max_new_tokens": ROOM, "pad_multiple": 1, **options}
        params = given.pop("params", self.params)
        return prefill(params, tokens, lengths=lengths, method=self.method if method is None else method, **given)

    def alone(self, row: int) -> Cache:
        """Prefill one prompt alone."""
        return self.read(rows=[self.prompts[row]] * self._copies)

    def go_on(self, cache: Cache, method: Method | None = None) -> Generation:
        """Generate `STEPS` greedy tokens, which no EOS ends, under the cache's method or another; consumes the cache."""
        limits = [STEPS] * cache.batch
        return generate(self.params, cache, method=method, max_new_tokens=STEPS, eos_token_ids=(), limits=limits)

    def go_half(self, cache: Cache) -> tuple[np.ndarray, Cache]:
        """Generate the first half of `go_on`'s tokens, int32 [B, STEPS // 2], and the cache; consumes the given cache."""
        half = STEPS // 2
        out = generate(self.params, cache, max_new_tokens=STEPS, eos_token_ids=(), limits=[half] * cache.batch)
        return np.asarray(out.tokens)[:, :half], out.cache

    def ask(self, cache: Cache, questions: Sequence[Sequence[int]] = QUESTIONS, width: int = 4) -> Cache:
        """Extend the cache by questions that are padded to ``width``; consumes the cache."""
        tokens, lengths = padded(questions, width)
        return extend(self.params, cache, tokens, lengths=lengths)

    def ask_alone(self, row: int, width: int = 4) -> Cache:
        """Prefill one prompt alone and extend it by its question of `QUESTIONS`."""
        return self.ask(self.alone(row), [QUESTIONS[row]] * self._copies, width)

    @functools.cached_property
    def base(self) -> tuple[np.ndarray, Generation]:
        """The logits after the three prompts, and `go_on`; its cache must not be consumed."""
        cache = self.read()
        logits = np.asarray(cache.logits)
        return logits, self.go_on(cache)

    @functools.cached_property
    def plain(self) -> Drive:
        """One layer of the method on its rows."""
        return self.drive()

    @property
    def layer(self) -> LayerMethod:
        """The method of the layer that `drive` runs."""
        return self.method.for_layer(0, 2)

    def drive(self, q: Any = None, k: Any = None, v: Any = None, method: Method | None = None, **options: Any) -> Drive:
        """Run one layer on the subject's rows, or on replacements for some of them.

        Args:
            q: [B, H, G, T, D].
            k: [B, H, T, D].
            v: [B, H, T, D].
            method: None takes the subject's method.
            **options: options of `kvjax.testing.layer.drive`.
        """
        q, k, v = (x if y is None else y for x, y in zip(self.rows, (q, k, v), strict=True))
        taken = self.method if method is None else method
        return drive(taken, q, k, v, self.lengths, prompt=self.rows[1].shape[2] - LAYER_STEPS, **options)


@functools.cache
def tokens_of_layer() -> tuple[np.ndarray, ...]:
    """Draw q [B, H, G, T, D], k and v [B, H, T, D] of one layer."""
    return random_tokens(11, len(LENGTHS), 2, 2, int(LENGTHS.max()) + LAYER_STEPS, 16)


@functools.cache
def random_prompts() -> tuple[tuple[int, ...], ...]:
    """Draw three prompts of different length, of token ids below 60."""
    rng = np.random.default_rng(3)
    return tuple(tuple(rng.integers(0, 60, n).tolist()) for n in (40, 23, 9))


def padded(rows: Any, width: int = WIDTH) -> tuple[np.ndarray, np.ndarray]:
    """Pad token lists to an array of ``width`` columns; with their lengths."""
    out = np.zeros((len(rows), width), np.int32)
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return out, np.array([len(row) for row in rows], np.int32)
