"""Whether Verified's tokens are Full's in float32, on many prompts under every draft."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import jax
import numpy as np

from experiments.answering import LoadedModel, pad
from experiments.records import Results
from experiments.speed.exact.caches import Drafting, Programs, groups_of
from experiments.speed.exact.drafts import make_drafts
from experiments.speed.exact.settings import ExactSettings
from experiments.speed.exact.texts import Prompts
from experiments.tasks import held_out_text
from kvjax.decoding.sampling import Sampler


def measure_equal(settings: ExactSettings, model: LoadedModel, results: Results, say: Callable[[str], None]) -> None:
    """Compare the tokens of every draft that the record lacks with Full's, greedily.

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
            "tokens": settings.tokens, "prompts": settings.prompts,
        }  # fmt: skip
        if results.find(identity) is None:
            jobs.append((Drafting(draft.method, depth), draft, identity))
    if not jobs:
        return
    begun = time.monotonic()
    batches = _batches(model, settings, length)
    sizes = {"room": settings.tokens, "steps": settings.tokens, "copies": 1, "chunk_size": settings.chunk_size}
    groups = groups_of(jobs, settings.group, lambda job: job[0].together)
    with Programs(model, sampler=Sampler(), ends=False, **sizes) as programs:
        handles = [programs.ahead(each, batches[0][1]) for each in ([Drafting(None)], *[[x[0] for x in g] for g in groups])]
        programs.wait(handles.pop(0))
        key = jax.random.key(0)
        full = [np.asarray(programs.decode(programs.read([Drafting(None)], batch)[0], key)[0].tokens) for _, batch in batches]
        say(f"{time.monotonic() - begun:7.1f} s  Full: {settings.prompts} prompts")
        for group, handle in zip(groups, handles, strict=True):
            programs.wait(handle)
            differ, passes = np.zeros(len(group), int), np.zeros(len(group))
            for (real, batch), want in zip(batches, full, strict=True):
                for at, cache in enumerate(programs.read([job[0] for job in group], batch)):
                    end, _ = programs.decode(programs.fork(cache), key)
                    differ[at] += int((np.asarray(end.tokens) != want)[:real].any(axis=1).sum())
                    passes[at] += int(np.asarray(end.cache.shared.passes)[:real].sum())
            for (_, _, identity), wrong, count in zip(group, differ, passes, strict=True):
                told = {"value": int(wrong), "unit": "prompts whose tokens differ"}
                per_pass = settings.prompts * settings.tokens / count
                results.add({**identity, **told, "tokens_per_pass": per_pass}, identity)
                say(
                    f"{time.monotonic() - begun:7.1f} s  {identity['method']:30s} {wrong} of {settings.prompts} prompts "
                    f"differ, {per_pass:.2f} tokens per pass"
                )


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
