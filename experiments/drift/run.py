"""Samples a long text and measures, at checkpoints, which of the best keys a search by clusters finds."""

from __future__ import annotations

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
from experiments.drift import search
from experiments.drift.report import draw
from experiments.drift.settings import CLUSTERS, DriftSettings
from experiments.records import make_record, save, write_bytes, write_record
from experiments.tasks import load_haystack
from kvjax.methods.pariskv import hashing
from kvjax.methods.pariskv.method import SCHEDULE


def run_drift(model: LoadedModel, settings: DriftSettings, out: pathlib.Path, *, plot: bool = True) -> dict[str, Any]:
    """Samples the text, measures, and writes OUT.json and OUT.png.

    Args:
        model: the model.
        settings: what to measure.
        out: the files' path without its ending.
        plot: whether to draw the figure.

    Returns:
        The record, see `experiments.records.make_record`.

    Raises:
        ValueError: the text would be longer than the model's position limit.
    """
    begun = time.monotonic()
    tokens = make_text(model, settings)
    tqdm.write(f"{time.monotonic() - begun:7.1f} s  {settings.new_tokens} tokens sampled")
    metrics = measure(model, tokens, settings)
    described = {**settings.as_dict(), "model": model.name, "weights": model.weights, "dtype": model.config.dtype}
    record = {
        **make_record("drift", described, metrics),
        "wall_seconds": round(time.monotonic() - begun, 1),
        "text_ends": model.tokenizer.decode(tokens[-100:].tolist()),
    }
    image = save(draw(record)) if plot else None  # before any file exists, so that an error leaves none
    write_record(out.with_suffix(".json"), record)
    if image is not None:
        write_bytes(out.with_suffix(".png"), image)
    return record


def make_text(model: LoadedModel, settings: DriftSettings) -> np.ndarray:
    """A prompt of prose and the continuation that Full samples: int32 [prompt_tokens + new_tokens].

    Raises:
        ValueError: the text would be longer than the model's position limit.
    """

    model.check_positions("--prompt-tokens and --new-tokens together", settings.prompt_tokens + settings.new_tokens)

    def count(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False).ids)

    haystack = load_haystack(settings.haystack, count, "eval")
    # Twice as much as needed, because joined sentences do not have exactly the sum of the sentences' tokens.
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


def _when(settings: DriftSettings, made: int) -> str:
    """A checkpoint's name: "first", "last", or its tokens."""
    ends = {settings.checkpoints[0]: "first", settings.checkpoints[-1]: "last"}
    return ends.get(made, str(made))


def scheduled(zone: int) -> tuple[float, float]:
    """ParisKV's rho and beta for a zone of ``zone`` tokens."""
    return next((rho, beta) for end, rho, beta in SCHEDULE if end is None or zone < end)


def measure(model: LoadedModel, tokens: np.ndarray, settings: DriftSettings) -> list[dict[str, Any]]:
    """Recall at every checkpoint, with every kind of clusters and both kinds of shares.

    Args:
        model: the model.
        tokens: int32 [T], see `make_text`.
        settings: what to measure.

    Returns:
        Metrics for `experiments.records.make_record`.
    """
    stored = [settings.prompt_tokens + made for made in settings.checkpoints]
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
    for index, (made, count) in enumerate(zip(tqdm(settings.checkpoints, unit="checkpoint"), stored, strict=True)):
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
                            "setting": {"clusters": name, "shares": kind, "when": _when(settings, made)},
                            "scores": [round(float(value), 4) for value in values.mean(axis=1)],
                            "clusters": name,
                            "shares": kind,
                            "rho": rho,
                            "beta": beta,
                            "generated": made,
                            "zone": zone,
                            "by_layer": [round(100 * float(value), 1) for value in values.mean(axis=1)],
                            "best_among_generated": round(100 * written, 1),
                        }
                    )
    return metrics
