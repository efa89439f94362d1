"""How many drafted tokens Full keeps on real text: by draft, budget, kind of text and temperature."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.answering import LoadedModel
from experiments.lab.exact.caches import Drafting, Job, Programs, run_jobs, same_share
from experiments.lab.exact.drafts import Draft, make_drafts
from experiments.lab.exact.settings import ExactSettings
from experiments.lab.exact.texts import Prompts, make_prompts
from experiments.records import Results
from experiments.speed.samplers import ByRow

Say = Callable[[str], None]


def measure_accepted(settings: ExactSettings, model: LoadedModel, results: Results, say: Say) -> None:
    """Measure the rows that the record does not have, length by length; Full's own tokens are made once for each length."""
    for length in settings.lengths:
        jobs = [
            Job(Drafting(draft.method, depth), draft.label, draft.at, identity)
            for draft in make_drafts(model, settings, length, say)
            for depth in settings.depths
            if results.find(identity := _identity(draft, depth, length, settings)) is None
        ]
        if jobs:
            _measure(settings, model, results, say, length, jobs)


def _identity(draft: Draft, depth: int, length: int, settings: ExactSettings) -> dict[str, Any]:
    how = {"texts": list(settings.texts), "temperatures": list(settings.temperatures), "samples": settings.samples}
    return {
        "name": "accepted", "method": draft.label, "knobs": draft.knobs, "length": length, "depth": depth,
        "tokens": settings.tokens, **how,
    }  # fmt: skip


def _measure(
    settings: ExactSettings, model: LoadedModel, results: Results, say: Say, length: int, jobs: Sequence[Job]
) -> None:
    prompts = make_prompts(model, settings, length, settings.samples)
    copies, rows = len(settings.temperatures), len(prompts.kinds)
    say(f"{length} tokens: {rows} prompts, {copies} temperatures, {len(jobs)} rows to measure")
    sampler = ByRow(temperature=jnp.tile(jnp.asarray(settings.temperatures, jnp.float32), rows))
    sizes = {"room": settings.tokens, "steps": settings.tokens, "copies": copies, "chunk_size": settings.chunk_size}
    full: list[tuple] = []

    def measure(job: Job, cache: Any) -> None:
        copy = jax.block_until_ready(programs.fork(cache))
        started = time.perf_counter()
        end, stats = jax.block_until_ready(programs.decode(copy))
        seconds = time.perf_counter() - started
        if not job.identity:
            full.append(jax.device_get((end.tokens, end.num_tokens)))
            say(f"Full: {int(full[0][1].sum())} tokens in {rows * copies} rows ({seconds:.1f} s)")
            return
        row = {**job.identity, **_figures(prompts, settings, end, stats, full[0]), "seconds": round(seconds, 3)}
        results.add(row, job.identity)
        say(f"{line(row)}  ({seconds:.1f} s)")

    key = jax.random.key(settings.seed)
    with Programs(model, sampler=sampler, key=key, ends=True, **sizes) as programs:
        run_jobs(programs, jobs, prompts, settings.group, say, measure)


def _figures(prompts: Prompts, settings: ExactSettings, end: Any, stats: Any, full: tuple) -> dict[str, Any]:
    """Count what became of drafted tokens, for each kind of text and temperature, and the bytes of a draft step."""
    shared = jax.device_get(end.cache.shared)
    counts, read = jax.device_get((end.num_tokens, stats.bytes_read))
    same = same_share(end.tokens, counts, full[0], full[1])
    passes, drafts = np.maximum(shared.passes, 1), shared.drafted.sum(axis=1) / np.maximum(shared.passes, 1)
    per_pass = 1 + shared.accepted.sum(axis=1) / passes
    whole = np.asarray(jax.device_get(stats.full_bytes_read))
    step = np.where(drafts > 0, (read * per_pass - whole) / np.maximum(drafts, 1e-9), 0)
    cells = []
    copies = len(settings.temperatures)
    for kind in settings.texts:
        for at, temperature in enumerate(settings.temperatures):
            mine = [copies * row + at for row, own in enumerate(prompts.kinds) if own == kind]
            drafted, accepted = shared.drafted[mine].sum(axis=0), shared.accepted[mine].sum(axis=0)
            kept = accepted / np.maximum(drafted, 1)
            cells.append({
                "text": kind, "temperature": temperature, "rows": len(mine), "tokens": int(counts[mine].sum()),
                "passes": int(shared.passes[mine].sum()), "drafted": drafted.tolist(), "accepted": accepted.tolist(),
                "kept": [round(float(x), 4) for x in kept], "same": round(float(same[mine].mean()), 4),
            })  # fmt: skip
    drafted, accepted = shared.drafted.sum(axis=0), shared.accepted.sum(axis=0)
    kept = [float(x) for x in accepted / np.maximum(drafted, 1)]
    return {
        "value": tokens_per_pass(kept, min(4, len(kept))),
        "unit": "tokens per pass of at most 4 drafted tokens",
        "kept": [round(x, 4) for x in kept],
        "same": round(float(same.mean()), 4),
        "draft_bytes": float(step.mean()),
        "full_bytes": float(whole.mean()),
        "cells": cells,
    }


def tokens_per_pass(kept: Sequence[float], depth: int) -> float:
    """Compute the tokens of a pass over ``depth`` drafted tokens.

    Args:
        kept: the share of the tokens drafted at each place that are kept, which means that all before them are kept, too.
        depth: at most the places of ``kept``.
    """
    return 1 + sum(kept[:depth])


def bytes_per_token(row: dict[str, Any], kept: Sequence[float], depth: int) -> float:
    """Compute the bytes of keys, values and metadata that a token takes: of a pass and ``depth`` draft steps."""
    return (row["full_bytes"] + depth * row["draft_bytes"]) / tokens_per_pass(kept, depth)


def line(row: dict[str, Any]) -> str:
    """Format a row for people."""
    told = []
    for depth in [depth for depth in (2, 4, 8) if depth <= row["depth"]] or [row["depth"]]:
        share = 100 * bytes_per_token(row, row["kept"], depth) / row["full_bytes"]
        told.append(f"{tokens_per_pass(row['kept'], depth):.2f} at {depth} ({share:.0f} % of the bytes)")
    return (
        f"{row['method']:30s} {row['length']:6d} depth {row['depth']}: tokens per pass {', '.join(told)}; "
        f"same as Full {100 * row['same']:.0f} %"
    )
