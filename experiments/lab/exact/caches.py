"""Caches of `kvjax.Verified` for many drafts from one reading of the prompts, and the programs that decode them."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvjax
from experiments.answering import LoadedModel
from experiments.lab.exact.texts import Prompts
from experiments.speed.verified_cache import verified_cache
from kvjax.accounting.stats import Stats
from kvjax.api.programs import generate_program, prefill_once_program, repeat_program
from kvjax.cache import Cache
from kvjax.decoding.decode import Decoded
from kvjax.methods import Full
from kvjax.protocol.method import Method

_MOST_THREADS = 8
_TOLD = 500  # letters of an error


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
        sampler: draws the tokens; see `experiments.speed.samplers`.
        key: for every call that decodes; None if the sampler needs none.
        ends: whether the model's end-of-text tokens end a row.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        room: int,
        steps: int,
        copies: int,
        chunk_size: int,
        sampler: Any,
        key: Array | None,
        ends: bool,
    ) -> None:
        self._model, self._sampler, self._key, self._copies = model, sampler, key, copies
        self._sizes: dict[str, Any] = {
            "model": model.config, "max_new_tokens": room, "chunk_size": chunk_size, "plan": None, "kv_dtype": None
        }  # fmt: skip
        self._eos = jnp.asarray(model.config.eos_token_ids if ends else (), jnp.int32)
        self._static = {"steps": steps, "stop_early": ends}
        self._begun: dict[Any, concurrent.futures.Future] = {}
        # A kernel's language may have a compiler in Python that takes one thread.
        self._tracer = concurrent.futures.ThreadPoolExecutor(1)
        self._pool = concurrent.futures.ThreadPoolExecutor(min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2)))

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *error: object) -> None:
        self._tracer.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    def ahead(self, ways: Sequence[Drafting], prompts: Prompts) -> concurrent.futures.Future:
        """Begin to compile what `read`, `fork` and `decode` run for these ways, once; `wait` takes the result."""
        key = tuple(jax.tree.structure(way.method) for way in ways), prompts.tokens.shape
        if key not in self._begun:
            self._begun[key] = self._tracer.submit(self._compile, ways, prompts)
        return self._begun[key]

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

    def decode(self, cache: Cache) -> tuple[Decoded, Stats]:
        """Decode; consumes the cache."""
        given = self._sampler, self._key, self._eos, jnp.zeros((cache.batch,), bool)
        return generate_program(self._model.params, cache, *given, None, **self._static)

    def _given(self, ways: Sequence[Drafting], prompts: Prompts) -> tuple:
        return self._model.params, jnp.asarray(prompts.tokens), jnp.asarray(prompts.lengths), _readers(ways)

    def _compile(self, ways: Sequence[Drafting], prompts: Prompts) -> list[concurrent.futures.Future]:
        traced = prefill_once_program.trace(*self._given(ways, prompts), **self._sizes)
        begun = [self._pool.submit(traced.lower().compile)]
        for cache in _caches(ways, traced.out_info.caches):
            forked = repeat_program.trace(cache, copies=self._copies)
            begun.append(self._pool.submit(forked.lower().compile))
            given = forked.out_info, self._sampler, self._key, self._eos
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


@dataclasses.dataclass(frozen=True)
class Job:
    """A row to measure.

    Attributes:
        way: how to decode.
        label: the draft's name in tables.
        at: which of the draft's budgets this is; jobs of equal numbers read prompts together.
        identity: the fields that tell the row from all others.
    """

    way: Drafting
    label: str = "Full"
    at: int = 0
    identity: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def run_jobs(
    programs: Programs,
    jobs: Sequence[Job],
    prompts: Prompts,
    size: int,
    say: Callable[[str], None],
    measure: Callable[[Job, Cache], None],
) -> None:
    """Read the prompts for Full and all jobs, and call ``measure`` with Full's job first, and then with each job.

    A job that fails is told, and the other jobs go on.

    Args:
        programs: reads and decodes.
        jobs: what to measure.
        prompts: the prompts.
        size: the most jobs that read the prompts together.
        say: tells a person.
        measure: takes a job, and a cache that it must not consume.
    """
    begun = [(group, programs.ahead([job.way for job in group], prompts)) for group in _groups(jobs, size)]
    for group, handle in begun:
        try:
            programs.wait(handle)
            caches = programs.read([job.way for job in group], prompts)
        except Exception as problem:
            if any(job.way.draft is None for job in group):
                raise
            say(f"{', '.join(job.label for job in group)} failed: {type(problem).__name__}: {problem}"[:_TOLD])
            continue
        for job in group:
            try:
                measure(job, caches.pop(0))  # which frees its arrays before the next group reads
            except (jax.errors.JaxRuntimeError, ValueError) as problem:
                if job.way.draft is None:
                    raise
                say(f"{job.label} failed: {type(problem).__name__}: {problem}"[:_TOLD])


def _groups(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Divide Full's job and all others into groups that read prompts together; a draft that must read alone is alone."""
    groups, last = [[Job(Drafting(None))]], min(job.at for job in jobs)
    for job in sorted(jobs, key=lambda job: (job.at, not job.way.together)):
        if not job.way.together or job.at != last or len(groups[-1]) > size:
            groups.append([])
        groups[-1].append(job)
        last = job.at
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
