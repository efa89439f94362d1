"""Tokens per second of Verified beside Full in a large model's shape with random weights, and a profile of a round."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.evaluation import Choice
from experiments.lab.exact.accepted import tokens_per_pass
from experiments.lab.exact.settings import ExactSettings
from experiments.lab.exact.timed import Say, compared, line
from experiments.records import Results, knobs_of
from experiments.speed.filled_cache import filled_cache
from experiments.speed.kernel_times import Kernel, read_kernels, total_times
from experiments.speed.samplers import Forced
from experiments.speed.settings import MODELS
from experiments.speed.variants import VARIANTS, setting
from kvjax.api import shard_map
from kvjax.decoding.layers import fingerprint
from kvjax.exact.verified import no_passes
from kvjax.methods import Full
from kvjax.protocol.method import Method
from models import random_params

_PHASES = "draft", "judge", "commit", "alone"  # the scopes of `kvjax.exact.verify`


def measure_shape(settings: ExactSettings, results: Results, say: Say) -> None:
    """Time Verified beside Full in the shape of a large model, with random weights and a cache of random keys and values.

    Drafted tokens are kept as often as `--acceptance` says, or as they were on real text by the rows of the record.
    """
    config = MODELS[settings.shape]()
    params = None
    for length, batch in settings.sized():
        full: dict[bool, dict[str, Any]] = {}  # by whether the draft is never right
        for choice in settings.drafts:
            try:
                chosen = _method(choice, length, config)
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
                wrong, sizes = not any(kept), (length, batch)
                if wrong not in full:
                    never = Forced.keeping([0.0] * depth, batch)
                    full[wrong] = _in_shape(settings, params, config, Full(), sizes, never, wrong)
                sampler = Forced.keeping(kept, batch)
                # A draft that is never right is given up, as it would with a real model.
                method = kvjax.Verified(draft=chosen, depth=depth, worth=0.5 if wrong else None)
                try:
                    own = _in_shape(settings, params, config, method, sizes, sampler, wrong)
                except jax.errors.JaxRuntimeError as problem:
                    say(f"{choice.label} {batch} x {length} failed: {problem}"[:300])
                    continue
                row = {**identity, **compared(own, full[wrong], batch, settings.tokens), "source": source}
                row |= {"same": None, "compile": own["compile"], "profile": own["profile"]}  # the tokens mean nothing
                row["full_profile"] = full[wrong]["profile"]
                results.add(row, identity)
                say(line({**row, "same": 1.0}) + f"; kept {source}: {tokens_per_pass(kept, depth):.2f} tokens per pass")


def _method(choice: Choice, length: int, config: Any) -> Method:
    """Make a draft: the variant of `experiments.speed`, or the method with the paper's knobs if there is none."""
    if choice.name in VARIANTS:
        return setting(choice.name, length, config, choice.knobs).method
    return choice.at(length, None, config, {}).method


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
    settings: ExactSettings,
    params: Any,
    config: Any,
    method: Method,
    sizes: tuple[int, int],
    sampler: Any,
    wrong: bool,
) -> dict[str, Any]:
    """Time calls that go on and on with the same cache; the first call is left out, and the last may be profiled.

    Beside a draft that is never right (``wrong``) there are two calls each time: at the first nothing is known of the draft.
    Full makes them, too, because a later call reads a longer cache.
    """
    length, batch = sizes
    room = settings.tokens * (2 * settings.repeats + 3) + 8
    cache = filled_cache(method, config, length=length, batch=batch, max_new_tokens=room, weights=fingerprint(params))
    run = functools.partial(shard_map.decode_and_measure, steps=settings.tokens, stop_early=False)
    rest = sampler, jax.random.key(settings.seed), jnp.zeros((0,), jnp.int32), jnp.zeros((batch,), bool)
    begun = time.perf_counter()
    program = jax.jit(run, donate_argnums=1).lower(params, cache, *rest).compile()
    compiled = time.perf_counter() - begun
    first, later, steps, end, stats = [], [], [], None, None
    for at in range(settings.repeats + 1):
        for spans in (first, later) if wrong else (first,):
            if wrong and method.drafts and spans is first:
                cache = dataclasses.replace(cache, shared=no_passes(cache.shared.draft, batch, method.drafts))
            begun = time.perf_counter()
            end, stats = jax.block_until_ready(program(params, cache, *rest))
            cache = end.cache
            if at:
                spans.append(time.perf_counter() - begun)
                steps.append(int(end.step))
    made = (
        profiled(lambda: program(params, cache, *rest), program.as_text(), settings.profile)
        if settings.profile
        else None
    )
    counters = {name: float(np.mean(x)) for name, x in (stats.counters if stats else {}).items()}
    none = np.zeros((batch, 1), np.int32)
    return {
        "first": statistics.median(first),
        "later": statistics.median(later or first),
        "spans": [first, later],
        "tokens": none,
        "counts": none[:, 0],
        "counters": counters,
        "steps": statistics.median(steps[:: 1 + wrong]),
        "compile": compiled,
        "profile": made,
    }


def profiled(run: Callable[[], Any], text: str, top: int) -> dict[str, Any] | None:
    """Run a call of a decoding program under JAX's profiler, and read what each of its steps took.

    Args:
        run: returns what `kvjax.api.shard_map.decode_and_measure` returns.
        text: the compiled program, whose instructions tell to which part of a round they belong.
        top: kernels that are listed.

    Returns:
        Seconds of a step or round from its first kernel to its last, and of its kernels: in all, by part, and by name; None
        if the profiler saw no kernels, as on a CPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            end, _ = jax.block_until_ready(run())
        devices = read_kernels(pathlib.Path(folder))
    if not devices:
        return None
    kernels, steps = devices[min(devices)], int(end.step)
    times, parts = total_times(min(devices), kernels), _parts(kernels, text)
    listed = [[name, count / steps, seconds / steps] for name, (count, seconds) in _kinds(kernels).items()]
    listed.sort(key=lambda kind: -kind[2])
    return {
        "steps": steps, "span": times.span / steps, "busy": times.busy / steps, "count": len(kernels) / steps,
        "parts": {part: [count / steps, seconds / steps] for part, (count, seconds) in parts.items()},
        "kernels": listed[:top], "others": [sum(kind[at] for kind in listed[top:]) for at in (1, 2)],
    }  # fmt: skip


def _kinds(kernels: Iterable[Kernel]) -> dict[str, tuple[int, float]]:
    """Sum the kernels by name without the numbers that a compiler adds: how often they ran, and their seconds."""
    return _sums((re.sub(r"([_.]\d+)+$", "", kernel.name), kernel.seconds) for kernel in kernels)


def _parts(kernels: Iterable[Kernel], text: str) -> dict[str, tuple[int, float]]:
    """Sum the kernels by the part of a round to which they belong, "other" if it is not known."""
    scopes = dict(re.findall(r'%?([\w.-]+) = [^\n]*op_name="([^"]*)"', text))
    scopes |= {name.replace(".", "_").replace("-", "_"): scope for name, scope in scopes.items()}

    def part(kernel: Kernel) -> str:
        told = " ".join([scopes.get(kernel.instruction, ""), scopes.get(kernel.name, ""), kernel.about]).split("/")
        return next((phase for phase in _PHASES if phase in told), "other")

    return _sums((part(kernel), kernel.seconds) for kernel in kernels)


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, tuple[int, float]]:
    made: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for name, seconds in pairs:
        made[name] = made[name][0] + 1, made[name][1] + seconds
    return dict(made)
