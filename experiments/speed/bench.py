"""The measurements of a process on one model: decode steps and the method's part of them, prefill, the largest batch."""

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from experiments.answering import Setting, make_mesh, mesh_axes, mesh_text
from experiments.records import Results, commit, knobs_of, operations, versions
from experiments.speed import report
from experiments.speed.roofline import Bandwidth, bytes_limit, measure_bandwidth, of_device, peak_bytes
from experiments.speed.rows import note_run, now
from experiments.speed.settings import CHUNK_SIZE, MODELS, MOST_ROWS, SpeedSettings
from experiments.speed.token_loop import TokenLoop, compiled
from experiments.speed.variants import Nothing, kv_dtype_of, read_knobs, setting
from kvjax.accounting.memory import check_memory, needed_each
from kvjax.api import shard_map
from kvjax.api.programs import cost_program
from kvjax.decoding.layer_bytes import placed_bytes
from kvjax.decoding.layers import layer_methods
from kvjax.mesh.sharding import place_rows, plan_of
from kvjax.protocol.method import Method, num_bytes
from models import random_params
from models.sharding import check_mesh


class Bench:
    """The measurements of a process on one model.

    Args:
        settings: what to time; they name a model and lengths.
        results: the record, which is read first and written after every row.
        bandwidth: the read bandwidth for floors; None measures it when the first row needs it.
        run: the time at which the process began; None means now.

    Attributes:
        failed: rows that ended with an error other than too little memory.
        run: the time at which the process began; the rows of the record name it.
        chunk_size: tokens of a prefill pass, of all rows together.
        most_rows: the batch at which the search for the largest batch begins at most.

    Raises:
        ValueError: a knob of a method that is not timed, a setting that a method refuses, or a mesh that does not fit.
    """

    def __init__(
        self, settings: SpeedSettings, results: Results, bandwidth: Bandwidth | None = None, run: str | None = None
    ) -> None:
        self.settings, self.results = settings, results
        self.mesh, self._placed = make_mesh(settings.mesh), mesh_text(mesh_axes(settings.mesh))
        self.config = MODELS[settings.model]()
        check_mesh(self.config, self.mesh)
        self.failed = 0
        self.chunk_size = settings.chunk_size or CHUNK_SIZE
        self.most_rows = settings.most_rows or MOST_ROWS
        self._knobs = read_knobs(settings.knobs)
        if unused := [name for name in self._knobs if name not in settings.variants]:
            raise ValueError(f"knobs must belong to one of {', '.join(settings.variants)}, got a knob of {unused[0]!r}")
        for name in settings.variants:  # so that a method refuses its settings before anything is measured
            for length in settings.lengths:
                self.setting(name, length)
        self.run = run or now()
        self._bandwidth = bandwidth

    @functools.cached_property
    def params(self) -> Any:
        """Random parameters."""
        return jax.block_until_ready(
            random_params(self.config, jax.random.key(0), mesh=self.mesh, weight_dtype=self.settings.weight_dtype)
        )

    @property
    def weights(self) -> int:
        """Bytes of the parameters on a device."""
        return num_bytes(of_device(self.params))

    @property
    def room(self) -> int:
        """Tokens that a cache must have room for to be timed."""
        return self.settings.tokens * (self.settings.repeats + 1) + 8

    @functools.cached_property
    def bandwidth(self) -> Bandwidth:
        """The read bandwidth in this run; the record keeps it beside the commit, the versions and the device."""
        measured = self._bandwidth or measure_bandwidth()
        about = {"commit": commit(), "versions": versions(), "device": jax.devices()[0].device_kind, **operations()}
        note_run(self.results, self.run, {**about, "read_bandwidth": dataclasses.asdict(measured)})
        return measured

    def setting(self, name: str, length: int, **knobs: Any) -> Setting:
        """Return a variant at a length; ``knobs`` override all other knobs."""
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
        """Look a row up in the record; if the record has none, measure the row and record it.

        Args:
            kind: "decode" or "prefill", or how a row of `experiments.speed.offload` decodes.
            name: see `VARIANTS`.
            length: tokens.
            batch: rows.
            measure: measures the row; the fields that it returns join the row.
            knobs: knobs of the variant, which override all other knobs.
            wanted: a field that a row of the record must have to count.
            **more: further fields that tell rows apart.
        """
        chosen = self.setting(name, length, **(knobs or {}))
        key = {"name": kind, "model": self.settings.shown_model, "mesh": self._placed, "method": name, "length": length}
        key |= {"batch": batch, "sums": None, **more}  # records of old have rows of other ways to sum
        identity = {**key, "knobs": knobs_of(chosen.method)}
        known = self.results.find(identity)
        if known is not None and _counts(known, wanted):
            print(f"{report.line(known, self.results.metrics)}, from the record", flush=True)
            return known
        old = self.results.find(key)
        if old is not None and old["knobs"] != identity["knobs"]:
            print(f"{kind:9s} {name:17s} {length:8d} {batch:4d} replaces the record's row of other settings", flush=True)
        bandwidth = self.bandwidth.bytes_per_second  # measured before anything fills the memory
        error, full, begun = None, False, time.monotonic()
        try:
            figures = measure(chosen)
        except Exception as problem:  # the other rows are still wanted
            full = isinstance(problem, MemoryError) or _lacks_memory(problem)
            error, figures = f"{type(problem).__name__}: {problem}"[:2000], {"value": None, "unit": "s"}
            self.failed += not full
        if error is not None:
            gc.collect()  # frees the memory of the failed attempt before the next row
        about = {"error": error, "out_of_memory": full, **({"bytes_limit": bytes_limit()} if full else {})}
        about |= {"note": chosen.note, "run": self.run, "bandwidth": bandwidth, "wall_seconds": time.monotonic() - begun}
        row = {**identity, **figures, **about}
        self.results.add(row, key)
        print(report.line(row, self.results.metrics), flush=True)
        return row

    def decode(self, name: str, length: int, batch: int, split: bool | None = None) -> dict[str, Any]:
        """Measure a row with the time per output token, see `decode_figures`.

        Args:
            name: see `VARIANTS`.
            length: tokens stored.
            batch: rows.
            split: split the time into the method's part and the rest; None does as the settings say.
        """
        split = self.settings.splits if split is None else split

        def measure(chosen: Setting) -> dict[str, Any]:
            figures = self.decode_figures(chosen.method, length, batch, kv_dtype_of(name))[0]
            return figures | ({"split": self._split(figures["value"], batch)} if split else {})

        return self.row("decode", name, length, batch, measure, wanted="split" if split else None)

    def _split(self, whole: float, batch: int) -> dict[str, float]:
        """Measure the seconds of the method's part of a step and of the rest."""
        rest = self.rest(batch)
        return {"rest": rest, "method": whole - rest}

    def rest(self, batch: int) -> float:
        """Measure the seconds per token of everything but the method, once per batch size and run."""
        key = {"model": self.settings.shown_model, "batch": batch, "run": self.run}  # a run has one mesh at most
        known = next((x for x in self.results.notes.get("rest", []) if key.items() <= x.items()), None)
        if known is None:
            figures, _ = self.decode_figures(Nothing(), 1, batch)
            known = {**key, "seconds": figures["value"]}
            self.results.change("rest", lambda rests: [*(rests or []), known])
        return known["seconds"]

    def cache_bytes(self, method: Method, length: int, batch: int, kv_dtype: str | None) -> int:
        """Compute the bytes on a device of a cache that is ready to decode; nothing is allocated."""
        sizes = {"batch": batch, "prompt_slots": length, "max_new_tokens": self.room, "chunk_size": length}
        (needed,) = needed_each([method], self.config, self.mesh, kv_dtype, sizes, False)
        return needed.after.alone

    def _to_read(self, method: Method, length: int, batch: int, kv_dtype: str | None) -> int:
        """Compute the bytes of parameters and caches on a device while it reads the prompts of a batch."""
        sizes = {"batch": batch, "prompt_slots": length, "max_new_tokens": self.room, "chunk_size": self.chunk_size}
        (needed,) = needed_each([method], self.config, self.mesh, kv_dtype, sizes, False, self.params)
        return num_bytes(self.params) + needed.reading.alone + needed.staged

    def decode_figures(
        self, method: Method, length: int, batch: int, kv_dtype: str | None = None
    ) -> tuple[dict[str, Any], Any]:
        """Time the jitted token loop. The cache is donated, and each repeat continues where the previous repeat ended.

        On a mesh, all bytes and the floor belong to one device.

        Args:
            method: the method under which tokens are decoded.
            length: tokens stored.
            batch: rows.
            kv_dtype: dtype of the stored keys and values.

        Returns:
            The figures of a row, and the cache after the last repeat.

        Raises:
            FloatingPointError: logits were not finite.
            MemoryError: the parameters and the cache alone exceed the memory of a device.
        """
        limit, needed = bytes_limit(), self.cache_bytes(method, length, batch, kv_dtype)
        if limit is not None and self.weights + needed > limit:  # an attempt would leave less memory for the next rows
            sizes = f"{needed / 1e9:.1f} GB beside {self.weights / 1e9:.1f} GB of parameters"
            raise MemoryError(f"the cache of {type(method).__name__} needs {sizes} on a device of {limit / 1e9:.1f} GB")
        settings = self.settings
        loop = TokenLoop(
            self.params, self.config, method, length=length, batch=batch, steps=settings.tokens, room=self.room,
            kv_dtype=kv_dtype,
        )  # fmt: skip
        spans = [loop.run() for _ in range(settings.repeats + 1)][1:]  # the first call warms up
        cache, plan, seen = loop.cache, loop.plan, cost_program(loop.cache)
        devices, groups = (1, 1) if plan is None else (plan.mesh.size, plan.groups)
        of_weights = self.config.weight_bytes(of_device(self.params), batch // groups)
        of_cache = float(seen.bytes_read.sum()) / devices
        read, seconds = of_weights + of_cache, statistics.median(spans)
        floor = self.bandwidth.seconds(read)
        memory = loop.program.memory_analysis()
        figures = {
            **_times(spans, "s/token"),
            "tokens": settings.tokens,
            "compile_seconds": loop.compile_seconds,
            "weight_bytes_read": of_weights,
            "cache_bytes_read": of_cache,
            "floor": floor,
            "ratio": seconds / floor,
            "achieved_bandwidth": read / seconds,
            "attended_tokens": float(seen.attended.mean()),
            "counters": {key: float(x.mean()) for key, x in seen.counters.items()},
            "weight_bytes": self.weights,
            "cache_bytes": num_bytes(of_device((cache.layers, cache.shared))),
            "program_bytes": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
        }
        return figures | {"tokens_per_second": batch / figures["value"]}, cache

    def prefill(
        self, name: str, length: int, batch: int, knobs: Mapping[str, Any] | None = None, **more: Any
    ) -> dict[str, Any]:
        """Measure a row with the time of prefill: the chunks, the method's compression, the logits of the first token.

        Args:
            name: see `VARIANTS`.
            length: tokens of the prompt.
            batch: rows.
            knobs: see `row`.
            **more: see `row`.
        """

        def measure(chosen: Setting) -> dict[str, Any]:
            layers = layer_methods(chosen.method, self.config)
            limits = [x for x in (layer.max_tokens(in_prompt=True) for layer in layers) if x is not None]
            tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, self.config.vocab_size, jnp.int32)
            plan, kv_dtype = plan_of(self.params), kv_dtype_of(name)
            sizes = {"max_new_tokens": self.settings.tokens, "chunk_size": self.chunk_size}
            read = functools.partial(shard_map.prefill_each, model=self.config, plan=plan, kv_dtype=kv_dtype, **sizes)
            prompt = place_rows(plan, tokens, jnp.full((batch,), length, jnp.int32))
            arguments = (self.params, *prompt, (chosen.method,))
            # A prompt that does not fit is refused here: an attempt would leave less memory for the rows that follow.
            check_memory([chosen.method], self.config, self.mesh, kv_dtype, sizes | {"batch": batch, "prompt_slots": length})
            program, compile_seconds = compiled(read, *arguments)
            spans, hosted = [], 0
            for _ in range(self.settings.repeats + 1):
                begun = time.perf_counter()
                (cache,) = jax.block_until_ready(program(*arguments))
                spans.append(time.perf_counter() - begun)
                hosted = placed_bytes((cache.layers, cache.shared))[1]
                del cache  # otherwise two caches would have to fit
            return {
                **_times(spans[1:], "s"),
                "tokens_per_second": batch * length / statistics.median(spans[1:]),
                "compile_seconds": compile_seconds,
                "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
                "peak_bytes": peak_bytes(),
                "device_limit": bytes_limit(),
                "weight_bytes": self.weights,
                "host_bytes": hosted,
                "read_at_once": min([self.chunk_size, length, *limits]),
            }

        return self.row("prefill", name, length, batch, measure, knobs, chunk_size=self.chunk_size, **more)

    def largest_batch(self, name: str, length: int) -> int:
        """Find the largest batch that decodes at a length, or 0 if none does; every batch that is tried has its row.

        The search begins at the most rows whose prompts can be read.
        """
        method = self.setting(name, length).method
        one = self.cache_bytes(method, length, 1, kv_dtype_of(name))
        limit = bytes_limit()
        most = self.most_rows if limit is None else min(self.most_rows, (limit - num_bytes(self.params)) // one)
        while limit is not None and most > 1 and self._to_read(method, length, most, kv_dtype_of(name)) > limit:
            most -= 1
        for batch in range(most, 0, -1):
            row = self.decode(name, length, batch, split=False)
            if row["error"] is None:
                break
            if not row["out_of_memory"]:
                return 0  # another error says nothing about the batches that fit
        else:
            batch = 0
        key = {"model": self.settings.shown_model, "method": name, "length": length}
        largest = {**key, "batch": batch, "bytes_per_row": one, "capped": batch == self.most_rows}
        self.results.change(
            "largest_batch", lambda known: [*(x for x in known or [] if not key.items() <= x.items()), largest]
        )
        return batch


def _times(spans: Sequence[float], unit: str) -> dict[str, Any]:
    """Summarise the seconds of the repeats."""
    value = statistics.median(spans)
    return {"value": value, "unit": unit, "least": min(spans), "most": max(spans), "repeats": len(spans)}


def _lacks_memory(problem: Exception) -> bool:
    return isinstance(problem, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(problem)


def _counts(known: Mapping[str, Any], wanted: str | None) -> bool:
    """Say whether a row of the record counts, so that it is not measured again.

    A row that ran out of memory counts as long as there is no more memory than there was.
    """
    if known["error"] is None:
        return wanted is None or wanted in known
    before, limit = known.get("bytes_limit"), bytes_limit()
    return known["out_of_memory"] and (before is None or limit is None or limit <= before)
