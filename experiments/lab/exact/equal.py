"""Whether Verified's tokens are Full's in float32, on many prompts under every draft."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from experiments.answering import LoadedModel, pad
from experiments.lab.exact.caches import Drafting, Job, Programs, run_jobs
from experiments.lab.exact.drafts import make_drafts
from experiments.lab.exact.settings import ExactSettings
from experiments.lab.exact.texts import Prompts
from experiments.records import Results
from experiments.tasks import held_out_text
from kvjax.decoding.sampling import Sampler

_PRECISION = "highest"


def measure_equal(settings: ExactSettings, model: LoadedModel, results: Results, say: Callable[[str], None]) -> None:
    """Compare the tokens of every draft that the record lacks with Full's, greedily, with products of whole float32.

    Raises:
        ValueError: the model does not compute in float32.
    """
    if model.config.dtype != "float32":
        raise ValueError(f"equal compares tokens in float32, got {model.config.dtype}: pass --dtype float32")
    length, depth = min(settings.lengths), max(settings.depths)
    jobs = []
    for draft in make_drafts(model, settings, length, say):
        identity = {
            "name": "equal", "method": draft.label, "knobs": draft.knobs, "length": length, "depth": depth,
            "tokens": settings.tokens, "prompts": settings.prompts, "products": _PRECISION,
        }  # fmt: skip
        if results.find(identity) is None:
            jobs.append(Job(Drafting(draft.method, depth), draft.label, draft.at, identity))
    if not jobs:
        return
    sizes = {"room": settings.tokens, "steps": settings.tokens, "copies": 1, "chunk_size": settings.chunk_size}
    differ, passes = np.zeros(len(jobs), int), np.zeros(len(jobs), int)
    with _precise(), Programs(model, sampler=Sampler(), key=None, ends=False, **sizes) as programs:
        for number, (real, prompts) in enumerate(_batches(model, settings, length)):
            full: list[np.ndarray] = []

            def measure(job: Job, cache: Any, real: int = real, full: list[np.ndarray] = full) -> None:
                end, _ = programs.decode(programs.fork(cache))
                tokens = np.asarray(end.tokens)[:real]
                if not job.identity:
                    full.append(tokens)
                    return
                at = jobs.index(job)
                differ[at] += int((tokens != full[0]).any(axis=1).sum())
                passes[at] += int(np.asarray(end.cache.shared.passes)[:real].sum())

            run_jobs(programs, jobs, prompts, settings.group, say, measure)
            say(f"batch {number + 1}: {int(differ.sum())} of all answers differ so far")
    for job, wrong, count in zip(jobs, differ.tolist(), passes.tolist(), strict=True):
        if not count:
            continue
        per_pass = settings.prompts * settings.tokens / count
        told = {"value": wrong, "unit": "prompts whose tokens differ", "tokens_per_pass": per_pass}
        results.add({**job.identity, **told}, job.identity)
        say(f"{job.label:30s} {wrong} of {settings.prompts} prompts differ, {per_pass:.2f} tokens per pass")


@contextlib.contextmanager
def _precise() -> Iterator[None]:
    """Let products of float32 be whole in all threads, where a GPU would round their operands to TF32."""
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", _PRECISION)
    try:
        yield
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def _batches(model: LoadedModel, settings: ExactSettings, length: int) -> list[tuple[int, Prompts]]:
    """Cut prompts of half to all of ``length`` tokens from held-out prose; also say how many of a batch are no copies."""
    ids = model.tokenizer.encode(held_out_text("prose"), add_special_tokens=False).ids
    rng = random.Random(f"equal/{length}/{settings.seed}")
    most = length - settings.tokens
    made = []
    for _ in range(settings.prompts):
        size = rng.randint(max(most // 2, 1), most)
        start = rng.randrange(len(ids) - size)
        made.append(ids[start : start + size])
    batches = []
    for first in range(0, len(made), settings.batch):
        mine = made[first : first + settings.batch]
        real = len(mine)
        mine += [mine[0]] * (min(settings.batch, len(made)) - real)
        tokens, lengths = pad(mine, -(-most // 128) * 128)
        batches.append((real, Prompts(tokens, lengths, ("prose",) * len(mine))))
    return batches
