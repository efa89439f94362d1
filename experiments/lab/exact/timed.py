"""Tokens per second of Verified beside Full, on real text and with drafts that are always wrong."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from experiments.answering import LoadedModel
from experiments.lab.exact.caches import Drafting, Job, Programs, run_jobs, same_share
from experiments.lab.exact.drafts import make_drafts
from experiments.lab.exact.settings import ExactSettings
from experiments.lab.exact.texts import Prompts, make_prompts
from experiments.records import Results
from experiments.speed.samplers import Forced
from kvjax.decoding.sampling import Sampler

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
        row = {**job.identity, **compared(own, full, batch, settings.tokens)}
        results.add(row, job.identity)
        say(line(row))

    given = {"room": 2 * settings.tokens, "steps": settings.tokens, "copies": 1, "chunk_size": settings.chunk_size}
    with Programs(model, sampler=drawn[0], key=drawn[1], ends=False, **given) as programs:
        run_jobs(programs, jobs, prompts, settings.group, say, measure)


def _timed(programs: Programs, cache: Any, settings: ExactSettings) -> dict[str, Any]:
    """Time a call of `Programs.decode` and the call that goes on, each by the median; the first time is left out."""
    first, later, end = [], [], None
    tokens = counts = stats = steps = None
    for at in range(settings.repeats + 1):
        end = None  # frees the last copy before the next one is made
        copy = jax.block_until_ready(programs.fork(cache))
        begun = time.perf_counter()
        end, stats = jax.block_until_ready(programs.decode(copy))
        between = time.perf_counter()
        tokens, counts, steps = end.tokens, end.num_tokens, int(end.step)
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
        "steps": steps,
    }


def compared(own: dict[str, Any], full: dict[str, Any], batch: int, tokens: int) -> dict[str, Any]:
    """Compare times with Full's; a ratio above 1 is faster than Full.

    A step is a round, or a step of Full alone. A call has as many steps as its slowest row needs.
    """
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
        "steps": own["steps"],
        "step_seconds": own["first"] / own["steps"],
        "full_step_seconds": full["first"] / full["steps"],
    }


def line(row: dict[str, Any]) -> str:
    """Format a row for people."""
    counters = row["counters"]
    kept = f", {counters['tokens_per_pass']:.2f} tokens per pass" if "tokens_per_pass" in counters else ""
    return (
        f"{row['name']:8s} {row['method']:30s} {row['batch']:3d} x {row['length']:6d} depth {row['depth']}: "
        f"{row['value']:8.1f} tokens/s, Full {row['full']:8.1f}: {row['ratio']:.3f} of Full's speed, later "
        f"{row['later_ratio']:.3f}, {1e3 * row['step_seconds']:.3f} ms a round, {1e3 * row['full_step_seconds']:.3f} a step"
        f" of Full{kept}, same {100 * row['same']:.0f} %"
    )
