"""The rows of exact decoding: drafts of `kvjax.Verified` on real prompts, which are read once for many drafts."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
import models
from experiments.answering import LoadedModel, needs_thresholds, pad
from experiments.lab.exact.samplers import ByRow
from experiments.lab.exact.settings import TEXTS, ExactSettings
from experiments.lab.exact.verified_cache import verified_cache
from experiments.lab.fidelity import FidelitySettings, answers, passages, share_rooms
from experiments.records import Results, knobs_of
from experiments.speed.samplers import Forced
from experiments.tasks import get_task, held_out_text
from kvjax.api.programs import generate_program
from kvjax.cache import Cache
from kvjax.decoding.sampling import Sampler
from kvjax.methods import Full
from kvjax.protocol.method import Method

_BLOCK = 128  # tokens; prompts are padded to a multiple of this
_SHOWN = 500  # letters of an error
_PRECISION = "highest"
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row to measure.

    Attributes:
        label: the draft's name in tables.
        method: `kvjax.Verified`, whose draft has room for the largest budget of its name.
        at: which of the draft's budgets this is; rows of equal numbers read prompts together.
        identity: the fields that tell the row from all others.
    """

    label: str
    method: Any
    at: int
    identity: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of a batch.

    Attributes:
        tokens: int32 [B, S], padded on the right.
        lengths: int32 [B].
        kinds: the kind of text of each row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    kinds: tuple[str, ...]


def make_prompts(model: LoadedModel, settings: ExactSettings, length: int, samples: int) -> Prompts:
    """Make ``samples`` prompts of each kind of text, the kinds in turn; behind each prompt the answer's tokens must fit."""
    texts = {kind: _of_kind(model, settings, length, samples, kind) for kind in settings.texts}
    order = [(kind, at) for at in range(samples) for kind in settings.texts]
    width = -(-(length - settings.tokens) // _BLOCK) * _BLOCK
    tokens, lengths = pad([texts[kind][at] for kind, at in order], width)
    return Prompts(tokens, lengths, tuple(kind for kind, _ in order))


def _of_kind(model: LoadedModel, settings: ExactSettings, length: int, samples: int, kind: str) -> list[list[int]]:
    running = kind in TEXTS
    asked = FidelitySettings(
        lengths=(length,),
        streams=(kind,) if running else ("answers",),
        samples=samples,
        tokens=settings.tokens,
        haystack=settings.haystack if kind == "prose" else "prose",
        task="listing" if running else kind,
        seed=settings.seed,
    )
    if running:
        texts = passages(model, asked, length, asked.haystack if kind == "prose" else kind)
    else:
        chat = models.ChatTemplate.from_directory(model.directory) if get_task(kind).chat else None
        # `answers` leaves room for the right answer alone, and all rows must have room for the tokens of the settings.
        texts = answers(model, asked, length - settings.tokens, chat.around() if chat else None)
    sizes = [min(size, length - settings.tokens) for size in texts.lengths.tolist()]
    return [row[:size].tolist() for row, size in zip(texts.prompts, sizes, strict=True)]


def rows_of(
    settings: ExactSettings, model: LoadedModel, results: Results, say: Say, length: int, depth: int, **more: Any
) -> list[Row]:
    """List the rows that the record lacks, a row for each draft at each budget; say which drafts Verified refuses.

    ``more`` are further fields of the rows' identities, and the knob ``worth`` of `kvjax.Verified`.
    """
    worth = more.pop("worth", None)
    choices, drafts = [], []
    for choice in settings.drafts:
        # Thresholds of CHESS would have to be calibrated; this trigger has none.
        extra = {"trigger": "fixed"} if needs_thresholds(choice.name, choice.knobs) else {}
        try:
            method = choice.at(length, model.tokenizer, model.config, extra).method
            kvjax.Verified(draft=method, depth=max(settings.depths)).for_layer(0, model.config.num_layers)
        except ValueError as error:
            say(f"{choice.label} is left out: {error}")
            continue
        choices.append(choice)
        drafts.append(method)
    rows, names = [], collections.Counter()
    for choice, method, roomy in zip(choices, drafts, share_rooms(choices, drafts, length), strict=True):
        identity = {
            "method": choice.label, "knobs": knobs_of(method), "length": length, "depth": depth,
            "tokens": settings.tokens, **more,
        }  # fmt: skip
        if results.find(identity) is None:
            verified = kvjax.Verified(draft=roomy, depth=depth, worth=worth)
            rows.append(Row(choice.label, verified, names[choice.name], identity))
        names[choice.name] += 1
    return rows


def each_cache(
    settings: ExactSettings, model: LoadedModel, prompts: Prompts, rows: Sequence[Row], room: int, say: Say
) -> Iterator[tuple[Row | None, Cache]]:
    """Read the prompts and yield Full's cache, and then a cache for each row; caches may share arrays, so copy them.

    A row whose prompt cannot be read is told, and left out.
    """

    def read(*methods: Method) -> list[Cache]:
        return kvjax.prefill_each(
            model.params, prompts.tokens, methods=methods, config=model.config, lengths=prompts.lengths,
            max_new_tokens=room, chunk_size=settings.chunk_size, share_storage=True,
        )  # fmt: skip

    yield None, read(Full())[0]
    together = [row for row in rows if row.method.draft.dense_prompt]
    groups = [[row] for row in rows if not row.method.draft.dense_prompt]
    for _, budget in itertools.groupby(sorted(together, key=lambda row: row.at), key=lambda row: row.at):
        groups += itertools.batched(budget, settings.group)
    for group in groups:
        alone = not group[0].method.draft.dense_prompt
        try:
            full, *drafts = read(group[0].method) if alone else read(Full(), *[row.method.draft for row in group])
        except (jax.errors.JaxRuntimeError, ValueError, MemoryError) as problem:
            names = ", ".join(row.label for row in group)
            say(f"{names} cannot be read: {type(problem).__name__}: {problem}"[:_SHOWN])
            continue
        for row in group:  # a draft's arrays are freed before the next group reads
            yield row, full if alone else verified_cache(row.method, full, drafts.pop(0))


def decode(model: LoadedModel, cache: Cache, sampler: Any, key: Any, steps: int, ends: bool = False) -> tuple[Any, Any]:
    """Decode with a sampler; consumes the cache. With ``ends``, the model's end-of-text tokens end a row."""
    eos = jnp.asarray(model.config.eos_token_ids if ends else (), jnp.int32)
    args = sampler, key, eos, jnp.zeros((cache.batch,), bool), None
    return jax.block_until_ready(generate_program(model.params, cache, *args, steps=steps, stop_early=ends))


def measure_accepted(settings: ExactSettings, model: LoadedModel, results: Results, say: Say, part: str) -> None:
    """Count the drafted tokens that Full keeps, by draft, budget, kind of text and temperature."""
    how = {"texts": list(settings.texts), "temperatures": list(settings.temperatures), "samples": settings.samples}
    for length in settings.lengths:
        rows = [x for n in settings.depths for x in rows_of(settings, model, results, say, length, n, name=part, **how)]
        if not rows:
            continue
        prompts, copies = make_prompts(model, settings, length, settings.samples), len(settings.temperatures)
        say(f"{length} tokens: {len(prompts.kinds)} prompts, {copies} temperatures, {len(rows)} rows to measure")
        sampler = ByRow(temperature=jnp.tile(jnp.asarray(settings.temperatures, jnp.float32), len(prompts.kinds)))
        key, full = jax.random.key(settings.seed), None
        for row, cache in each_cache(settings, model, prompts, rows, settings.tokens, say):
            end, stats = decode(model, kvjax.fork(cache, copies), sampler, key, settings.tokens, ends=True)
            if row is None:
                full = jax.device_get((end.tokens, end.num_tokens))
                continue
            metric = {**row.identity, **_figures(prompts, settings, end, stats, full)}
            results.add(metric, row.identity)
            say(f"{row.label:30s} depth {row.method.depth}: {metric['value']:.2f} tokens per pass, same {metric['same']:.2f}")


def _figures(prompts: Prompts, settings: ExactSettings, end: Any, stats: Any, full: Any) -> dict[str, Any]:
    """Count what became of drafted tokens, for each kind of text and temperature, and the bytes of a draft step."""
    shared = jax.device_get(end.cache.shared)
    counts, read = jax.device_get((end.num_tokens, stats.bytes_read))
    same = same_share(end.tokens, counts, full[0], full[1])
    passes = np.maximum(shared.passes, 1)
    drafts, per_pass = shared.drafted.sum(axis=1) / passes, 1 + shared.accepted.sum(axis=1) / passes
    whole = np.asarray(jax.device_get(stats.full_bytes_read))
    step = np.where(drafts > 0, (read * per_pass - whole) / np.maximum(drafts, 1e-9), 0)
    cells = []
    copies = len(settings.temperatures)
    for kind in settings.texts:
        for at, temperature in enumerate(settings.temperatures):
            mine = [copies * row + at for row, name in enumerate(prompts.kinds) if name == kind]
            drafted, accepted = shared.drafted[mine].sum(axis=0), shared.accepted[mine].sum(axis=0)
            kept = accepted / np.maximum(drafted, 1)
            cells.append({
                "text": kind, "temperature": temperature, "rows": len(mine), "tokens": int(counts[mine].sum()),
                "passes": int(shared.passes[mine].sum()), "drafted": drafted.tolist(), "accepted": accepted.tolist(),
                "kept": [round(float(x), 4) for x in kept], "same": round(float(same[mine].mean()), 4),
            })  # fmt: skip
    kept = [float(x) for x in shared.accepted.sum(axis=0) / np.maximum(shared.drafted.sum(axis=0), 1)]
    return {
        "value": 1 + sum(kept[:4]),
        "unit": "tokens per pass of at most 4 drafted tokens",
        "kept": [round(x, 4) for x in kept],
        "same": round(float(same.mean()), 4),
        "draft_bytes": float(step.mean()),
        "full_bytes": float(whole.mean()),
        "cells": cells,
    }


def measure_times(settings: ExactSettings, model: LoadedModel, results: Results, say: Say, part: str) -> None:
    """Time Verified beside Full greedily (the same tokens), or, for "rejected", where no drafted token is kept."""
    for length, batch, depth in itertools.product(settings.lengths, settings.batches, settings.depths):
        more = {"name": part, "batch": batch, "texts": list(settings.texts), "worth": 0.5}
        rows = rows_of(settings, model, results, say, length, depth, **more)
        if not rows:
            continue
        drawn = (Sampler(), None)
        if part == "rejected":
            drawn = Forced.keeping([0.0] * depth, batch), jax.random.key(settings.seed)
        whole = make_prompts(model, settings, length, math.ceil(batch / len(settings.texts)))
        prompts = Prompts(whole.tokens[:batch], whole.lengths[:batch], whole.kinds[:batch])
        full: dict[str, Any] = {}
        for row, cache in each_cache(settings, model, prompts, rows, 2 * settings.tokens, say):
            times = _times(model, settings, cache, drawn)
            if row is None:
                full = times
                continue
            metric = {**row.identity, **beside_full(times, full, batch, settings.tokens)}
            results.add(metric, row.identity)
            say(f"{part} {row.label:30s} {batch} x {length}: {metric['ratio']:.3f} of Full's {metric['full']:.1f} tokens/s")


def _times(model: LoadedModel, settings: ExactSettings, cache: Cache, drawn: tuple[Any, Any]) -> dict[str, Any]:
    """Time a call that decodes and the call that goes on, which knows the draft; the first repeat is left out."""
    spans: tuple[list[float], list[float]] = ([], [])
    times: dict[str, Any] = {}
    for at in range(settings.repeats + 1):
        copy = jax.block_until_ready(kvjax.fork(cache))
        for call in spans:
            begun = time.perf_counter()
            end, stats = decode(model, copy, *drawn, settings.tokens)
            if at:
                call.append(time.perf_counter() - begun)
            if call is spans[0]:
                times = {"tokens": end.tokens, "counts": end.num_tokens, "steps": int(end.step)}
            copy = end.cache
        times["counters"] = {name: float(np.mean(x)) for name, x in stats.counters.items()}
        del copy, end  # frees the last copy before the next one is made
    return {**times, "first": statistics.median(spans[0]), "later": statistics.median(spans[1]), "spans": spans}


def beside_full(times: Mapping[str, Any], full: Mapping[str, Any], batch: int, tokens: int) -> dict[str, Any]:
    """Compare times with Full's; a ratio above 1 is faster. A step is a round, or a step of Full alone."""
    return {
        "value": batch * tokens / times["first"],
        "unit": "tokens/s",
        "full": batch * tokens / full["first"],
        "ratio": full["first"] / times["first"],
        "later_ratio": full["later"] / times["later"],
        "seconds": list(times["spans"]),
        "full_seconds": list(full["spans"]),
        "same": float(same_share(times["tokens"], times["counts"], full["tokens"], full["counts"]).mean()),
        "counters": times["counters"],
        "steps": times["steps"],
        "step_seconds": times["first"] / times["steps"],
        "full_step_seconds": full["first"] / full["steps"],
    }


def measure_equal(settings: ExactSettings, model: LoadedModel, results: Results, say: Say, part: str) -> None:
    """Compare the tokens of every draft that the record lacks with Full's, greedily, with products of whole float32.

    Raises:
        ValueError: the model does not compute in float32.
    """
    if model.config.dtype != "float32":
        raise ValueError(f"equal compares tokens in float32, got {model.config.dtype}: pass --dtype float32")
    length, depth = min(settings.lengths), max(settings.depths)
    more = {"name": part, "prompts": settings.prompts, "products": _PRECISION}
    rows = rows_of(settings, model, results, say, length, depth, **more)
    differ, passes = dict.fromkeys(map(id, rows), 0), dict.fromkeys(map(id, rows), 0)
    with jax.default_matmul_precision(_PRECISION):  # a GPU would round operands of float32 to TF32
        for real, prompts in _batches(model, settings, length) if rows else ():
            full = np.zeros(0)
            for row, cache in each_cache(settings, model, prompts, rows, settings.tokens, say):
                end, _ = decode(model, kvjax.fork(cache), Sampler(), None, settings.tokens)
                tokens = np.asarray(end.tokens)[:real]
                if row is None:
                    full = tokens
                    continue
                differ[id(row)] += int((tokens != full).any(axis=1).sum())
                passes[id(row)] += int(np.asarray(end.cache.shared.passes)[:real].sum())
    for row in (row for row in rows if passes[id(row)]):
        per_pass = settings.prompts * settings.tokens / passes[id(row)]
        count = {"value": differ[id(row)], "unit": "prompts whose tokens differ", "tokens_per_pass": per_pass}
        results.add({**row.identity, **count}, row.identity)
        say(f"{row.label:30s} {count['value']} of {settings.prompts} prompts differ, {per_pass:.2f} tokens per pass")


def _batches(model: LoadedModel, settings: ExactSettings, length: int) -> Iterator[tuple[int, Prompts]]:
    """Cut prompts of half to all of ``length`` tokens from held-out prose; also say how many of a batch are no copies."""
    ids = model.tokenizer.encode(held_out_text("prose"), add_special_tokens=False).ids
    rng = random.Random(f"equal/{length}/{settings.seed}")
    most, cut = length - settings.tokens, []
    for _ in range(settings.prompts):
        size = rng.randint(max(most // 2, 1), most)
        start = rng.randrange(len(ids) - size)
        cut.append(ids[start : start + size])
    for group in map(list, itertools.batched(cut, settings.batch)):
        full = [*group, *[group[0]] * (min(settings.batch, len(cut)) - len(group))]
        yield len(group), Prompts(*pad(full, -(-most // _BLOCK) * _BLOCK), ("prose",) * len(full))


def same_share(tokens: Any, counts: Any, full: Any, full_counts: Any) -> np.ndarray:
    """Compute the share of each row's tokens before its first difference from Full's: float [B].

    Args:
        tokens, full: int [B, N].
        counts, full_counts: int [B], tokens of each row.
    """
    tokens, full = np.asarray(tokens), np.asarray(full)
    most = np.maximum(np.asarray(counts), np.asarray(full_counts))
    differs = (tokens != full) & (np.arange(tokens.shape[1])[None] < most[:, None])
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), most)
    return first / np.maximum(most, 1)
