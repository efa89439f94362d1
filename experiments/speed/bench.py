"""One process's measurements of one model: decode steps, prompts, one layer's attention, the largest batch."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from experiments.answering.presets import Setting
from experiments.records import record
from experiments.records.resumable import Results, knobs_of
from experiments.speed import report as speed_report
from experiments.speed.filled_cache import filled_cache, state_bytes
from experiments.speed.one_layer import attend_seconds, layer_seconds
from experiments.speed.roofline import Bandwidth, measure_bandwidth, roofline, weight_bytes
from experiments.speed.variants import VARIANTS, Nothing, setting
from kvjax import stats
from kvjax.memory import check_memory, placed_bytes
from kvjax.method import Method, num_bytes
from kvjax.sampling import Sampler
from kvjax.step import fingerprint, layer_methods, run_decode, run_prefill
from models import ModelConfig, random_params

MODELS: dict[str, Callable[[], ModelConfig]] = {
    "llama-3.1-8b": ModelConfig.llama31_8b,
    "qwen3-8b": ModelConfig.qwen3_8b,
    "llama-3.2-1b": ModelConfig.llama32_1b,
    "qwen3-0.6b": ModelConfig.qwen3_0_6b,
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to time, and how; see `python -m experiments.speed --help`.

    Raises:
        ValueError: an unknown model or method, or a number below 1.
    """

    model: str
    methods: tuple[str, ...]
    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    tokens: int = 32
    repeats: int = 5
    split: bool = True
    chunk_size: int = 8192
    queries: int = 1
    most_rows: int = 64

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}, expected one of {', '.join(MODELS)}")
        for name in self.methods:
            if name not in VARIANTS:
                raise ValueError(f"unknown method {name!r}, expected one of {', '.join(VARIANTS)}")
        numbers = {name: vars(self)[name] for name in ("tokens", "repeats", "chunk_size", "queries", "most_rows")}
        for name, value in [
            *numbers.items(),
            *(("length", n) for n in self.lengths),
            *(("batch", n) for n in self.batches),
        ]:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class Bench:
    """One process's measurements of one model.

    Args:
        plan: what to time.
        results: read, and written after every row.
        knobs: by variant, before the variant's own.
        bandwidth: what floors are computed from; None measures it when the first row needs it.

    Attributes:
        run: when it began, which rows of the record name.

    Raises:
        ValueError: a knob of a method that is not timed, or a setting that a method refuses.
    """

    def __init__(
        self,
        plan: Plan,
        results: Results,
        knobs: Mapping[str, Mapping[str, Any]] | None = None,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.plan, self.results = plan, results
        self.config = MODELS[plan.model]()
        self.failed = 0
        self._knobs = knobs or {}
        if unused := [name for name in self._knobs if name not in plan.methods]:
            raise ValueError(f"a knob of {unused[0]!r}, which is none of the methods {', '.join(plan.methods)}")
        for name in plan.methods:  # what a method refuses, it refuses before anything is measured
            for length in plan.lengths:
                self.setting(name, length)
        self.run = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        self._bandwidth = bandwidth

    @functools.cached_property
    def params(self) -> Any:
        """Random parameters."""
        return jax.block_until_ready(random_params(self.config, jax.random.key(0)))

    @property
    def weights(self) -> int:
        """Bytes of the parameters."""
        return num_bytes(self.params)

    @property
    def room(self) -> int:
        """Tokens that a cache must have room for to be timed."""
        return self.plan.tokens * (self.plan.repeats + 1) + 8

    @functools.cached_property
    def bandwidth(self) -> Bandwidth:
        """Read bandwidth in this run; kept in the record beside what ran it."""
        found = self._bandwidth or measure_bandwidth()
        about = {"commit": record.commit(), "versions": record.versions(), "device": jax.devices()[0].device_kind}
        mine = {self.run: {**about, "read_bandwidth": dataclasses.asdict(found)}}
        self.results.change("runs", lambda runs: {**(runs or {}), **mine})
        return found

    def setting(self, name: str, length: int, **knobs: Any) -> Setting:
        """A variant at a length; ``knobs`` go before all others."""
        return setting(name, length, self.config, {**self._knobs.get(name, {}), **knobs})

    def row(
        self,
        kind: str,
        name: str,
        length: int,
        batch: int,
        measure: Callable[[Setting], dict[str, Any]],
        knobs: Mapping[str, Any] | None = None,
        wanted: str | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """A row from the record, or else measured and recorded.

        Args:
            kind: "decode", "prefill" or "attention".
            name: see `VARIANTS`.
            length: tokens.
            batch: rows.
            measure: what to run; its result joins the row.
            knobs: of the variant, before all others.
            wanted: a field without which a row of the record does not count.
            **more: what else tells rows apart.
        """
        chosen = self.setting(name, length, **(knobs or {}))
        place = {"name": kind, "model": self.plan.model, "method": name, "length": length, "batch": batch, **more}
        identity = {**place, "knobs": knobs_of(chosen.method)}
        found = self.results.find(identity)
        if found is not None and self._stands(found, wanted):
            print(f"{speed_report.line(found, self.results.metrics)}, from the record", flush=True)
            return found
        old = self.results.find(place)
        if old is not None and old["knobs"] != identity["knobs"]:
            print(f"{kind:9s} {name:17s} {length:8d} {batch:4d} replaces the record's row of other settings", flush=True)
        bandwidth = self.bandwidth.bytes_per_second  # before anything fills the memory
        error, full, begun = None, False, time.monotonic()
        try:
            measured = measure(chosen)
        except Exception as problem:  # one row less; the others are still wanted
            full = isinstance(problem, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(problem)
            full |= isinstance(problem, MemoryError)
            error = f"{type(problem).__name__}: {problem}"[:2000]
            measured = {"value": None, "unit": "s"}
            self.failed += not full
        if error is not None:
            gc.collect()  # what the failed attempt allocated, before the next one
        made = {
            **identity,
            **measured,
            "error": error,
            "out_of_memory": full,
            **({"bytes_limit": bytes_limit()} if full else {}),
            "note": chosen.note,
            "run": self.run,
            "bandwidth": bandwidth,
            "wall_seconds": time.monotonic() - begun,
        }
        self.results.add(made, place)
        print(speed_report.line(made, self.results.metrics), flush=True)
        return made

    @staticmethod
    def _stands(found: Mapping[str, Any], wanted: str | None) -> bool:
        """Whether a row need not be measured again; one that ran out of memory need not while there is no more of it."""
        if found["error"] is None:
            return wanted is None or wanted in found
        limit, now = found.get("bytes_limit"), bytes_limit()
        return found["out_of_memory"] and (limit is None or now is None or now <= limit)

    def decode(self, name: str, length: int, batch: int, split: bool | None = None) -> dict[str, Any]:
        """Time per output token (see `decode_figures`), split into its parts if asked, by default as planned."""
        split = self.plan.split if split is None else split

        def measure(chosen: Setting) -> dict[str, Any]:
            figures, cache = self.decode_figures(chosen.method, length, batch)
            return figures | ({"split": self._split(figures["value"], cache, batch)} if split else {})

        return self.row("decode", name, length, batch, measure, wanted="split" if split else None)

    def _split(self, whole: float, cache: Any, batch: int) -> dict[str, float | None] | None:
        """Seconds of a step's parts; None if there is no memory to measure them."""
        try:
            rest, alone = self.rest(batch), attend_seconds(cache)
        except jax.errors.JaxRuntimeError as problem:
            if "RESOURCE_EXHAUSTED" not in str(problem):
                raise
            return None
        select = None if alone is None else whole - rest - alone
        return {"rest": rest, "attend": alone, "select": select, "select_and_attend": whole - rest}

    def rest(self, batch: int) -> float:
        """Seconds per token of everything but the method, once per batch size and run."""
        place = {"model": self.plan.model, "batch": batch, "run": self.run}
        known = next((x for x in self.results.notes.get("rest", []) if place.items() <= x.items()), None)
        if known is None:
            figures, _ = self.decode_figures(Nothing(), 1, batch)
            known = {**place, "seconds": figures["value"]}
            self.results.change("rest", lambda found: [*(found or []), known])
        return known["seconds"]

    def decode_figures(self, method: Method, length: int, batch: int) -> tuple[dict[str, Any], Any]:
        """Runs the jitted token loop, the cache donated, each repeat going on where the one before ended.

        Args:
            method: what decodes.
            length: tokens stored.
            batch: rows.

        Returns:
            The figures of a row, and the cache after them.

        Raises:
            FloatingPointError: logits were not finite.
        """
        plan, params = self.plan, self.params
        peak = _peak_bytes()
        cache = filled_cache(
            method, self.config, length=length, batch=batch, max_new_tokens=self.room, weights=fingerprint(params)
        )
        arguments = (Sampler(), None, jnp.zeros((0,), jnp.int32), jnp.zeros((batch,), bool))
        loop = functools.partial(run_decode, steps=plan.tokens, stop_early=False)
        begun = time.perf_counter()
        program = jax.jit(loop, donate_argnums=1).lower(params, cache, *arguments).compile()
        compile_seconds = time.perf_counter() - begun
        spans = []
        for _ in range(plan.repeats + 1):
            begun = time.perf_counter()
            end = jax.block_until_ready(program(params, cache, *arguments))
            spans.append((time.perf_counter() - begun) / plan.tokens)
            cache = end.cache
            if (end.bad_step >= 0).any():
                raise FloatingPointError("logits were not finite")
        spans = spans[1:]  # the first call warms up
        seen = jax.jit(stats.measure)(cache)
        of_weights, of_cache = weight_bytes(params, self.config, batch), float(seen.bytes_read.sum())
        seconds = statistics.median(spans)
        roof = roofline(of_weights + of_cache, seconds, self.bandwidth)
        memory = program.memory_analysis()
        figures = {
            "value": seconds,
            "unit": "s/token",
            "least": min(spans),
            "most": max(spans),
            "repeats": plan.repeats,
            "tokens": plan.tokens,
            "tokens_per_second": batch / seconds,
            "compile_seconds": compile_seconds,
            "weight_bytes_read": of_weights,
            "cache_bytes_read": of_cache,
            "full_bytes_read": float(seen.full_bytes_read.sum()),
            "floor": roof.floor,
            "ratio": roof.ratio,
            "achieved_bandwidth": roof.achieved,
            "attended_tokens": float(seen.attended.mean()),
            "counters": {key: float(x.mean()) for key, x in seen.counters.items()},
            "weight_bytes": num_bytes(params),
            "cache_bytes": num_bytes((cache.layers, cache.shared)),
            "program_bytes": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
            "peak_bytes": _peak_bytes(),  # of the process so far, the filling of the cache included
            "peak_bytes_before": peak,
        }
        return figures, cache

    def prefill(
        self, name: str, length: int, batch: int, knobs: Mapping[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """Time to read a prompt: the chunks, the method's compression, the first token's logits; the rest as in `row`."""

        def measure(chosen: Setting) -> dict[str, Any]:
            layers = layer_methods(chosen.method, self.config)
            limits = [x for x in (layer.max_tokens(in_prompt=True) for layer in layers) if x is not None]
            tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, self.config.vocab_size, jnp.int32)
            read = functools.partial(
                run_prefill, model=self.config, max_new_tokens=self.plan.tokens, chunk_size=self.plan.chunk_size
            )
            arguments = (self.params, tokens, jnp.full((batch,), length, jnp.int32), chosen.method)
            # Tried in vain, it would leave less memory to the rows that follow.
            sizes = {"max_new_tokens": self.plan.tokens, "chunk_size": self.plan.chunk_size}
            check_memory(chosen.method, self.config, batch=batch, prompt_slots=length, **sizes)
            begun = time.perf_counter()
            program = jax.jit(read).lower(*arguments).compile()
            compile_seconds = time.perf_counter() - begun
            spans, hosted = [], 0
            for _ in range(self.plan.repeats + 1):
                begun = time.perf_counter()
                cache = jax.block_until_ready(program(*arguments))
                spans.append(time.perf_counter() - begun)
                hosted = placed_bytes((cache.layers, cache.shared))[1]
                del cache  # or two would have to fit
            seconds = statistics.median(spans[1:])
            return {
                "value": seconds,
                "unit": "s",
                "least": min(spans[1:]),
                "most": max(spans[1:]),
                "repeats": self.plan.repeats,
                "tokens_per_second": batch * length / seconds,
                "compile_seconds": compile_seconds,
                "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
                "peak_bytes": _peak_bytes(),
                "device_limit": bytes_limit(),
                "weight_bytes": self.weights,
                "host_bytes": hosted,
                "read_at_once": min([self.plan.chunk_size, length, *limits]),
            }

        return self.row("prefill", name, length, batch, measure, knobs, chunk_size=self.plan.chunk_size, **more)

    def attention(self, name: str, length: int) -> dict[str, Any]:
        """One layer's store, select, attend and update, as a decode step or as a prompt chunk has it."""

        def measure(chosen: Setting) -> dict[str, Any]:
            took = layer_seconds(
                chosen.method, self.config, length=length, queries=self.plan.queries, repeats=self.plan.repeats
            )
            figures = {"value": took.seconds.median, "unit": "s/layer", "attended_tokens": took.attended}
            for field in ("least", "most"):
                figures[field] = vars(took.seconds)[field]
            if took.bytes_read is not None:
                roof = roofline(took.bytes_read, took.seconds.median, self.bandwidth)
                figures |= {"cache_bytes_read": roof.bytes_read, "floor": roof.floor, "ratio": roof.ratio}
                figures["achieved_bandwidth"] = roof.achieved
            excluded = "what is done once per step for all layers" if chosen.method.spans_layers else ""
            return {**figures, "compile_seconds": took.seconds.compile, "excluded": excluded}

        return self.row("attention", name, length, 1, measure, queries=self.plan.queries)

    def largest_batch(self, name: str, length: int) -> int:
        """The largest batch that decodes at a length, 0 if none; every batch tried has its row."""
        method = self.setting(name, length).method
        row = state_bytes(method, self.config, length=length, max_new_tokens=self.room)
        limit = bytes_limit()
        free = None if limit is None else limit - num_bytes(self.params)
        most = self.plan.most_rows if free is None else min(self.plan.most_rows, free // row)
        for batch in range(most, 0, -1):
            made = self.decode(name, length, batch, split=False)
            if made["error"] is None:
                break
            if not made["out_of_memory"]:
                return 0  # which says nothing about what fits
        else:
            batch = 0
        place = {"model": self.plan.model, "method": name, "length": length}
        mine = {**place, "batch": batch, "bytes_per_row": row, "capped": batch == self.plan.most_rows}
        self.results.change(
            "largest_batch", lambda found: [*(x for x in found or [] if not place.items() <= x.items()), mine]
        )
        return batch


def bytes_limit() -> int | None:
    """Bytes this process may allocate on the device; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def _peak_bytes() -> int | None:
    """Most bytes ever allocated on the device by this process; None where the device does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
