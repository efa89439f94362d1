"""Does search by clusters survive a long generation? ``python -m experiments.lab.ablations drift``.

Full samples a long text after a prompt of prose. At checkpoints of that text, a search looks for the keys with the largest
q.k in ParisKV's retrieval zone, in every layer and KV head. It uses cluster votes and the 4-bit estimate, with five kinds of
clusters:

* ``rotated``: ParisKV's own, sign clusters of rotated keys, for which nothing is learned;
* ``plain``: sign clusters of the keys without rotation;
* ``learned``: 256 k-means clusters for each slice of 8 channels, learned on the keys of the prompt only;
* ``learned rotated``: learned on directions of rotated keys of the prompt, as ParisKV rotates them;
* ``relearned``: as ``learned``, but learned anew on all keys at every checkpoint; its lead over ``learned`` is the loss by
  drift.

Candidates of the learned clusters are ranked by the estimate from rotated keys. The "fixed" shares are ParisKV's shares
for long zones; "schedule" is its schedule by the zone's length, which changes within the text.
"""

from __future__ import annotations

import dataclasses
import pathlib
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kvjax
from experiments.answering import LoadedModel
from experiments.lab.ablations import cluster_search as search
from experiments.records import make_record, write_record
from experiments.tasks import load_haystack
from kvjax.methods.pariskv import hashing
from kvjax.methods.pariskv.method import SCHEDULE
from models.hub.progress import progress_bar

CLUSTERS = ("rotated", "plain", "learned", "learned rotated", "relearned")
_SHORT_PROMPT = 512  # tokens, if the default prompt and text exceed the model's window


@dataclasses.dataclass(frozen=True)
class Course:
    """The text that is sampled, and the search at its checkpoints.

    Attributes:
        prompt_tokens: tokens of prose.
        new_tokens: sampled tokens.
        every: tokens between checkpoints.
        k: keys to find.
        num_sink: tokens before the zone.
        num_local: tokens behind the zone.
        rho: share of the zone's keys that get votes, per slice.
        beta: share of the zone that becomes candidates.
        temperature: temperature of the sampling.
        seed: seed of the prompt and of the sampling.
    """

    prompt_tokens: int = 2048
    new_tokens: int = 8000
    every: int = 500
    k: int = 100
    num_sink: int = 64
    num_local: int = 256
    rho: float = 0.20
    beta: float = 0.10
    temperature: float = 1.0
    seed: int = 0

    @classmethod
    def within(cls, window: int, seed: int) -> Course:
        """Choose the default sizes, or a shorter prompt and text that fit a model's window of ``window`` tokens."""
        course = cls(seed=seed)
        if course.prompt_tokens + course.new_tokens <= window:
            return course
        room = (window - _SHORT_PROMPT) // course.every * course.every
        return dataclasses.replace(course, prompt_tokens=_SHORT_PROMPT, new_tokens=max(room, course.every))

    @property
    def checkpoints(self) -> list[int]:
        """Numbers of generated tokens at which recall is measured."""
        return list(range(self.every, self.new_tokens + 1, self.every)) or [self.new_tokens]


def run_drift(model: LoadedModel, settings: Course, out: pathlib.Path) -> None:
    """Sample the text, measure recall, and write the record.

    Args:
        model: the model.
        settings: what to measure.
        out: the file of the record, see `experiments.records.make_record`.

    Raises:
        ValueError: the text would be longer than the model's position limit.
    """
    begun = time.monotonic()
    tokens = make_text(model, settings)
    tqdm.write(f"{time.monotonic() - begun:7.1f} s  {settings.new_tokens} tokens sampled")
    metrics = measure(model, tokens, settings)
    described = {**dataclasses.asdict(settings), "model": model.name, "weights": model.weights, "dtype": model.config.dtype}
    record = {
        **make_record("drift", described, metrics),
        "wall_seconds": round(time.monotonic() - begun, 1),
        "text_ends": model.tokenizer.decode(tokens[-100:].tolist()),
    }
    write_record(out, record)


def make_text(model: LoadedModel, settings: Course) -> np.ndarray:
    """Make a prompt of prose and sample its continuation with Full: int32 [prompt_tokens + new_tokens].

    Raises:
        ValueError: the text would be longer than the model's position limit.
    """
    model.check_positions("a prompt and its continuation together", settings.prompt_tokens + settings.new_tokens)

    def count(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False).ids)

    haystack = load_haystack("prose", count, "eval")
    # Twice the needed tokens, because joined sentences do not have exactly the sum of the sentences' tokens.
    sentences = haystack.span(random.Random(settings.seed), 2 * settings.prompt_tokens)
    ids = model.tokenizer.encode(haystack.separator.join(sentences)).ids[: settings.prompt_tokens]
    cache = kvjax.prefill(model.params, [ids], config=model.config, max_new_tokens=settings.new_tokens)
    out = kvjax.generate(
        model.params,
        cache,
        max_new_tokens=settings.new_tokens,
        eos_token_ids=(),
        temperature=settings.temperature,
        key=jax.random.key(settings.seed),
    )
    return np.concatenate([np.asarray(ids, np.int32), np.asarray(out.tokens[0])])


def _when(settings: Course, generated: int) -> str:
    """Name a checkpoint: "first", "last", or its number of tokens."""
    ends = {settings.checkpoints[0]: "first", settings.checkpoints[-1]: "last"}
    return ends.get(generated, str(generated))


def scheduled(zone: int) -> tuple[float, float]:
    """Look up ParisKV's rho and beta for a zone of ``zone`` tokens."""
    return next((rho, beta) for end, rho, beta in SCHEDULE if end is None or zone < end)


def measure(model: LoadedModel, tokens: np.ndarray, settings: Course) -> list[dict[str, Any]]:
    """Measure recall at every checkpoint, with every kind of clusters and both kinds of shares.

    Args:
        model: the model.
        tokens: int32 [T], see `make_text`.
        settings: what to measure.

    Returns:
        Metrics for `experiments.records.make_record`.
    """
    stored = [settings.prompt_tokens + generated for generated in settings.checkpoints]
    at = jnp.asarray([count - 1 for count in stored], jnp.int32)
    queries, keys = search.capture(model.params, jnp.asarray(tokens), at, config=model.config)
    rotated, rotated_codes, rotated_queries = search.sign_clusters(keys, queries, rotated=True)
    plain, plain_codes, plain_queries = search.sign_clusters(keys, queries, rotated=False)
    learned = search.learned_clusters(keys, queries, jnp.int32(settings.prompt_tokens))
    turned = search.rotated_directions(keys, queries)
    learned_rotated = search.learned_clusters(*turned, jnp.int32(settings.prompt_tokens))
    scale = jnp.float32(hashing.rotation_scale(model.config.head_dim))
    sizes = {"k": settings.k, "num_sink": settings.num_sink, "num_local": settings.num_local}
    metrics = []
    bar = progress_bar(iterable=settings.checkpoints, unit="checkpoint")
    for index, (generated, count) in enumerate(zip(bar, stored, strict=True)):
        size, which = jnp.int32(count), jnp.int32(index)
        best = search.exact_best(keys, queries[:, :, index], size, **sizes)
        relearned = search.learned_clusters(keys, queries, size)
        analytic = (rotated_codes, rotated_queries[:, :, index], scale)
        arms = {
            "rotated": (rotated, *analytic),
            "plain": (plain, plain_codes, plain_queries[:, :, index], jnp.float32(1)),
            "learned": (learned, *analytic),
            "learned rotated": (learned_rotated, *analytic),
            "relearned": (relearned, *analytic),
        }
        zone = count - settings.num_sink - settings.num_local
        written = float(np.asarray(best)[:, :, settings.prompt_tokens :].sum() / np.asarray(best).sum())
        for kind, (rho, beta) in (("fixed", (settings.rho, settings.beta)), ("schedule", scheduled(zone))):
            for name in CLUSTERS:
                shares = search.recall(*arms[name], best, size, which, jnp.float32(rho), jnp.float32(beta), **sizes)
                for stage, values in zip(("coarse", "final"), jax.device_get(shares), strict=True):
                    metrics.append(
                        {
                            "name": f"{stage}_recall",
                            "value": round(100 * float(values.mean()), 2),
                            "unit": "percent",
                            "setting": {"clusters": name, "shares": kind, "when": _when(settings, generated)},
                            "scores": [round(float(value), 4) for value in values.mean(axis=1)],
                            "clusters": name,
                            "shares": kind,
                            "rho": rho,
                            "beta": beta,
                            "generated": generated,
                            "zone": zone,
                            "by_layer": [round(100 * float(value), 1) for value in values.mean(axis=1)],
                            "best_among_generated": round(100 * written, 1),
                        }
                    )
    return metrics
