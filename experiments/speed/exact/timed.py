"""Tokens per second of Verified beside Full: on real text, with drafts that are always wrong, in a large model's shape."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvjax
from experiments.answering import LoadedModel
from experiments.records import Results, knobs_of
from experiments.speed.exact.accepted import tokens_per_pass
from experiments.speed.exact.caches import Drafting, Job, Programs, run_jobs, same_share
from experiments.speed.exact.drafts import make_drafts
from experiments.speed.exact.settings import ExactSettings
from experiments.speed.exact.texts import Prompts, make_prompts
from experiments.speed.filled_cache import filled_cache
from experiments.speed.samplers import Forced
from experiments.speed.settings import MODELS
from experiments.speed.variants import setting
from kvjax.api import shard_map
from kvjax.decoding.layers import fingerprint
from kvjax.decoding.sampling import Sampler
from kvjax.method import Method
from kvjax.methods import Full
from models import random_params

Say = Callable[[str], None]


def measure_speed(settings: ExactSettings, model: LoadedModel, results: Results, say: Say) -> None:
    """Time Verified beside Full on real text, greedily: the same tokens, in the same run."""
    for length, batch, depth in itertools.product(settings.lengths, settings.batches, settings.depths):
        _beside_full("speed", settings, model, results, say, (length, batch, depth), (Sampler(), None))


def measure_rejected(settings: ExactSettings, model: LoadedModel, results: Results, say: Say) -> None:
    """Time Verified beside Full where no drafted token is kept: first calls, and later calls, which know the draft."""
    for length, batch, depth in itertools.product(settings.lengths, settings.batches, settings.depths):
        drawn = Forced.keeping([0.0] * depth, batch), jax.random.key(settings.seed)
        _beside_full("rejected", settings, model, results, say, (length, batch, depth), drawn)


def _beside_full(
    name: str,
    settings: ExactSettings,
    model: LoadedModel,
    results: Results,
    say: Say,
    sizes: tuple[int, int, int],
    drawn: tuple[Any, Array | None],
) -> None:
    """Time Full and every draft that the record lacks at a length, a number of rows, and a depth."""
    length, batch, depth = sizes
    jobs = []
    for draft in make_drafts(model, settings, length, say):
        identity = {
            "name": name, "method": draft.label, "knobs": draft.knobs, "length": length, "batch": batch, "depth": depth,
            "tokens": settings.tokens, "texts": list(settings.texts),
        }  # fmt: skip
        if results.find(identity) is None:
            jobs.append(Job(Drafting(draft.method, depth, 0.5), draft.label, draft.at, identity))
    if not jobs:
        return
    made = make_prompts(model, settings, length, math.ceil(batch / len(settings.texts)))
    prompts = Prompts(made.tokens[:batch], made.lengths[:batch], made.kinds[:batch])
    full: dict[str, Any] = {}

    def measure(job: Job, cache: Any) -> None:
        own = _timed(programs, cache, settings)
        if not job.identity:
            full.update(own)
            say(f"Full, {batch} x {length}: {batch * settings.tokens / full['first']:.1f} tokens/s")
            return
        row = {**job.identity, **_compared(own, full, batch, settings.tokens)}
        results.add(row, job.identity)
        say(line(row))

    given = {"room": 2 * settings.tokens, "steps": settings.tokens, "copies": 1, "chunk_size": settings.chunk_size}
    with Programs(model, sampler=drawn[0], key=drawn[1], ends=False, **given) as programs:
        run_jobs(programs, jobs, prompts, settings.group, say, measure)


def _timed(programs: Programs, cache: Any, settings: ExactSettings) -> dict[str, Any]:
    """Time a call of `Programs.decode` and the call that goes on, each by the median; the first time is left out."""
    first, later, end = [], [], None
    tokens = counts = stats = None
    for at in range(settings.repeats + 1):
        end = None  # frees the last copy before the next one is made
        copy = jax.block_until_ready(programs.fork(cache))
        begun = time.perf_counter()
        end, stats = jax.block_until_ready(programs.decode(copy))
        between = time.perf_counter()
        tokens, counts = end.tokens, end.num_tokens
        end, stats = jax.block_until_ready(programs.decode(end.cache))
        if at:
            first.append(between - begun)
            later.append(time.perf_counter() - between)
    counters = {} if stats is None else {name: float(np.mean(x)) for name, x in stats.counters.items()}
    return {
        "first": statistics.median(first),
        "later": statistics.median(later),
        "spans": [first, later],
        "tokens": tokens,
        "counts": counts,
        "counters": counters,
    }


def _compared(own: dict[str, Any], full: dict[str, Any], batch: int, tokens: int) -> dict[str, Any]:
    """Compare times with Full's; a ratio above 1 is faster than Full."""
    return {
        "value": batch * tokens / own["first"],
        "unit": "tokens/s",
        "full": batch * tokens / full["first"],
        "ratio": full["first"] / own["first"],
        "later_ratio": full["later"] / own["later"],
        "seconds": own["spans"],
        "full_seconds": full["spans"],
        "same": float(same_share(own["tokens"], own["counts"], full["tokens"], full["counts"]).mean()),
        "counters": own["counters"],
    }


def line(row: dict[str, Any]) -> str:
    """Format a row for people."""
    counters = row["counters"]
    kept = f", {counters['tokens_per_pass']:.2f} tokens per pass" if "tokens_per_pass" in counters else ""
    return (
        f"{row['name']:8s} {row['method']:30s} {row['batch']:3d} x {row['length']:6d} depth {row['depth']}: "
        f"{row['value']:8.1f} tokens/s, Full {row['full']:8.1f}: {row['ratio']:.3f} of Full's speed, later "
        f"{row['later_ratio']:.3f}{kept}, same {100 * row['same']:.0f} %"
    )


def measure_shape(settings: ExactSettings, results: Results, say: Say) -> None:
    """Time Verified beside Full in the shape of a large model, with random weights and a cache of random keys and values.

    Drafted tokens are kept as often as `--acceptance` says, or as they were on real text by the rows of the record.
    """
    config = MODELS[settings.shape]()
    params = None
    for length, batch in settings.sized():
        full = None
        for choice in settings.drafts:
            try:
                chosen = setting(choice.name, length, config, choice.knobs).method
                jobs = [(depth, _rates(settings, results, choice.label, depth)) for depth in settings.depths]
                kvjax.Verified(draft=chosen, depth=max(settings.depths)).for_layer(0, config.num_layers)
            except ValueError as error:
                say(f"{choice.label} is left out: {error}")
                continue
            for depth, (kept, source) in jobs:
                identity = {
                    "name": "shape", "model": settings.shape, "method": choice.label, "knobs": knobs_of(chosen),
                    "length": length, "batch": batch, "depth": depth, "kept": kept, "tokens": settings.tokens,
                }  # fmt: skip
                if results.find(identity) is not None:
                    continue
                params = random_params(config, jax.random.key(0)) if params is None else params
                never = Forced.keeping([0.0] * depth, batch)
                full = full or _in_shape(settings, params, config, Full(), (length, batch), never)
                sampler = Forced.keeping(kept, batch)
                method = kvjax.Verified(draft=chosen, depth=depth, worth=None)
                try:
                    own = _in_shape(settings, params, config, method, (length, batch), sampler)
                except jax.errors.JaxRuntimeError as problem:
                    say(f"{choice.label} {batch} x {length} failed: {problem}"[:300])
                    continue
                row = {**identity, **_compared(own, full, batch, settings.tokens), "source": source}
                row["same"] = None  # the tokens mean nothing
                results.add(row, identity)
                say(line({**row, "same": 1.0}) + f"; kept {source}: {tokens_per_pass(kept, depth):.2f} tokens per pass")


def _rates(settings: ExactSettings, results: Results, label: str, depth: int) -> tuple[list[float], str]:
    """Return the share of drafted tokens kept at each place, and where it comes from.

    Raises:
        ValueError: the record has no such row of the draft, and the settings have no shares.
    """
    if settings.acceptance:
        if len(settings.acceptance) < depth:
            raise ValueError(f"acceptance must have a share for each of {depth} places, got {len(settings.acceptance)}")
        return list(settings.acceptance[:depth]), "as given"
    rows = [
        row for row in results.metrics if row["name"] == "accepted" and row["method"] == label and row["depth"] >= depth
    ]
    if not rows:
        raise ValueError(
            f"the record has no acceptance of {label} at depth {depth}: measure it first, or pass --acceptance"
        )
    row = max(rows, key=lambda row: row["length"])
    return row["kept"][:depth], f"measured at {row['length']} tokens"


def _in_shape(
    settings: ExactSettings, params: Any, config: Any, method: Method, sizes: tuple[int, int], sampler: Any
) -> dict[str, Any]:
    """Time calls that go on and on with the same cache; the first call is left out."""
    length, batch = sizes
    room = settings.tokens * (settings.repeats + 1) + 8
    cache = filled_cache(method, config, length=length, batch=batch, max_new_tokens=room, weights=fingerprint(params))
    run = functools.partial(shard_map.decode_and_measure, steps=settings.tokens, stop_early=False)
    program = jax.jit(run, donate_argnums=1)
    rest = sampler, jax.random.key(settings.seed), jnp.zeros((0,), jnp.int32), jnp.zeros((batch,), bool)
    spans, end, stats = [], None, None
    for at in range(settings.repeats + 1):
        begun = time.perf_counter()
        end, stats = jax.block_until_ready(program(params, cache, *rest))
        spans += [time.perf_counter() - begun] * (at > 0)
        cache = end.cache
    counters = {name: float(np.mean(x)) for name, x in (stats.counters if stats else {}).items()}
    middle = statistics.median(spans)
    none = np.zeros((batch, 1), np.int32)
    return {
        "first": middle, "later": middle, "spans": [spans], "tokens": none, "counts": none[:, 0], "counters": counters
    }  # fmt: skip
