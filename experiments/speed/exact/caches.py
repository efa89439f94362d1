"""Caches of `kvjax.Verified` for many drafts from one reading of the prompts, and the programs that decode them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvjax
from experiments.answering import LoadedModel
from experiments.speed.exact.texts import Prompts
from kvjax.accounting.stats import Stats
from kvjax.api.programs import generate_program, prefill_once_program, repeat_program
from kvjax.cache import Cache
from kvjax.decoding.decode import Decoded
from kvjax.decoding.layers import layer_methods
from kvjax.decoding.sliding_window import layer_windows
from kvjax.method import Method
from kvjax.methods import Full
from kvjax.wrappers.verified import Verified
from kvjax.wrappers.verified_layer import Pair, Passes

_MOST_THREADS = 8


def verified_cache(method: Verified, full: Cache, draft: Cache) -> Cache:
    """Make the cache of ``method`` from the caches of Full and of its draft, which have read the same prompts together.

    It is the cache that `kvjax.prefill` would make, whose prefill is Full's; the arrays are those of the given caches.

    Args:
        method: whose draft has a dense prompt.
        full: Full's cache.
        draft: the draft's cache; its arrays, or their shapes.
    """
    batch, model = full.batch, full.model
    layers = []
    for layer, window, exact, guess in zip(
        layer_methods(method, model), layer_windows(model), full.layers, draft.layers, strict=True
    ):
        shares = window is not None or layer.shares
        layers.append(guess if shares else Pair(full=exact, draft=guess))
    places = jnp.zeros((batch, method.depth), jnp.int32)
    shared = Passes(
        draft=draft.shared,
        passes=jnp.zeros((batch,), jnp.int32),
        drafted=places,
        accepted=places,
        rate=jnp.ones((batch,), jnp.float32),
        rest=jnp.zeros((batch,), jnp.int32),
    )
    return dataclasses.replace(full, method=dataclasses.replace(method, draft=draft.method), layers=tuple(layers), shared=shared)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A way to decode: Full, or Verified with a draft.

    Attributes:
        draft: the draft; None is Full.
        depth: the most drafted tokens of a pass.
        worth: see `kvjax.Verified`.
    """

    draft: Method | None
    depth: int = 0
    worth: float | None = None

    @property
    def method(self) -> Method:
        """The method that decodes."""
        return Full() if self.draft is None else kvjax.Verified(draft=self.draft, depth=self.depth, worth=self.worth)

    @property
    def together(self) -> bool:
        """Whether the draft reads prompts beside others."""
        return self.draft is None or self.draft.dense_prompt

    def cache(self, full: Cache, draft: Cache) -> Cache:
        """Make the cache to decode from Full's and the draft's."""
        return full if self.draft is None else verified_cache(self.method, full, draft)


class Programs:
    """Reads prompts and decodes, with programs that threads compile ahead of their use.

    Args:
        model: the model.
        room: tokens that may follow a prompt.
        steps: tokens that a call decodes.
        copies: of each row, after the prompt is read.
        chunk_size: prompt tokens of a pass.
        sampler: draws the tokens; see `experiments.speed.exact.samplers`.
        ends: whether the model's end-of-text tokens end a row.
    """

    def __init__(
        self, model: LoadedModel, *, room: int, steps: int, copies: int, chunk_size: int, sampler: Any, ends: bool
    ) -> None:
        self._model, self._sampler, self._copies = model, sampler, copies
        self._sizes: dict[str, Any] = {
            "model": model.config, "max_new_tokens": room, "chunk_size": chunk_size, "plan": None, "kv_dtype": None
        }  # fmt: skip
        self._eos = jnp.asarray(model.config.eos_token_ids if ends else (), jnp.int32)
        self._static = {"steps": steps, "stop_early": ends}
        # A kernel's language may have a compiler in Python that takes one thread.
        self._tracer = concurrent.futures.ThreadPoolExecutor(1)
        self._pool = concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2)))

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *error: object) -> None:
        self._tracer.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    def ahead(self, ways: Sequence[Drafting], prompts: Prompts) -> concurrent.futures.Future:
        """Begin to compile what `read`, `fork` and `decode` run for these ways; `wait` takes the result."""
        return self._tracer.submit(self._compile, ways, prompts)

    @staticmethod
    def wait(begun: concurrent.futures.Future) -> None:
        """Wait for the programs that `ahead` has begun to compile."""
        for program in begun.result():
            program.result()

    def read(self, ways: Sequence[Drafting], prompts: Prompts) -> list[Cache]:
        """Read the prompts once, and return a cache for each way to decode; the caches have arrays in common."""
        return _caches(ways, prefill_once_program(*self._given(ways, prompts), **self._sizes).caches)

    def fork(self, cache: Cache) -> Cache:
        """Copy a cache, each row as often as this object was told."""
        return repeat_program(cache, copies=self._copies)

    def decode(self, cache: Cache, key: Array) -> tuple[Decoded, Stats]:
        """Decode; consumes the cache."""
        done = jnp.zeros((cache.batch,), bool)
        return generate_program(self._model.params, cache, self._sampler, key, self._eos, done, None, **self._static)

    def _given(self, ways: Sequence[Drafting], prompts: Prompts) -> tuple:
        return self._model.params, jnp.asarray(prompts.tokens), jnp.asarray(prompts.lengths), _readers(ways)

    def _compile(self, ways: Sequence[Drafting], prompts: Prompts) -> list[concurrent.futures.Future]:
        traced = prefill_once_program.trace(*self._given(ways, prompts), **self._sizes)
        begun = [self._pool.submit(traced.lower().compile)]
        for cache in _caches(ways, traced.out_info.caches):
            forked = repeat_program.trace(cache, copies=self._copies)
            begun.append(self._pool.submit(forked.lower().compile))
            given = forked.out_info, self._sampler, jax.random.key(0), self._eos
            done = jax.ShapeDtypeStruct((forked.out_info.batch,), jnp.bool_)
            decoder = generate_program.trace(self._model.params, *given, done, None, **self._static)
            begun.append(self._pool.submit(decoder.lower().compile))
        return begun


def _drafts(ways: Sequence[Drafting]) -> dict[int, Method]:
    """Return the drafts by identity, each once."""
    return {id(way.draft): way.draft for way in ways if way.draft is not None}


def _readers(ways: Sequence[Drafting]) -> tuple[Method, ...]:
    """List the methods that read prompts together: Full first, then the drafts; a draft that must read alone is alone."""
    if not all(way.together for way in ways):
        (way,) = ways
        return (way.method,)
    return (Full(), *_drafts(ways).values())


def _caches(ways: Sequence[Drafting], made: Sequence[Cache]) -> list[Cache]:
    """Make the caches of the ways from the caches of their `_readers`."""
    if not all(way.together for way in ways):
        return list(made)
    by_draft = dict(zip(_drafts(ways), made[1:], strict=True))
    return [way.cache(made[0], by_draft.get(id(way.draft), made[0])) for way in ways]


def groups_of(ways: Iterable[Any], size: int, together: Any) -> list[list[Any]]:
    """Divide ways to decode into groups of at most ``size`` that read prompts together; who must read alone is alone."""
    groups: list[list[Any]] = []
    open_group: list[Any] | None = None
    for way in ways:
        if not together(way):
            groups.append([way])
        elif open_group is not None and len(open_group) < size:
            open_group.append(way)
        else:
            open_group = [way]
            groups.append(open_group)
    return groups


def same_share(tokens: Any, counts: Any, full: Any, full_counts: Any) -> np.ndarray:
    """Compute the share of each row's tokens before its first difference from Full's: float [B].

    Args:
        tokens, full: int [B, N].
        counts, full_counts: int [B], tokens of each row.
    """
    tokens, full = np.asarray(tokens), np.asarray(full)
    most = np.maximum(np.asarray(counts), np.asarray(full_counts))
    place = np.arange(tokens.shape[1])[None]
    differs = (tokens != full) & (place < most[:, None])
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), most)
    return first / np.maximum(most, 1)
