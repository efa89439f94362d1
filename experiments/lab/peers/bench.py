"""The rows of a process: one for each method, length, batch and cache. This file needs torch."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from experiments.lab.peers import filled_cache, random_model, report
from experiments.lab.peers.decoding import decode_times
from experiments.lab.peers.filled_cache import MissingPeerError
from experiments.lab.peers.settings import PACKAGES, PeersSettings
from experiments.records import Results, commit, versions
from experiments.speed.rows import note_run, now
from experiments.speed.settings import MODELS
from experiments.speed.variants import budget_at


class Bench:
    """The measurements of a process on one model.

    Args:
        settings: what to time.
        results: the record, which is read first and written after every row.
        device: where the model is.

    Attributes:
        failed: rows that ended with an error other than too little memory or a missing peer.
    """

    def __init__(self, settings: PeersSettings, results: Results, device: torch.device) -> None:
        self.settings, self.results, self.device = settings, results, device
        self.failed = 0

    @functools.cached_property
    def run(self) -> str:
        """The name of this process in the record."""
        run, device = now(), self.results.settings["device"]
        note_run(self.results, run, {"commit": commit(), "versions": versions(PACKAGES), "device": device})
        return run

    @functools.cached_property
    def model(self) -> transformers.PreTrainedModel:
        """The model with random weights."""
        return random_model.random_model(MODELS[self.settings.model](), self.settings.attention, self.device)

    def row(self, method: str, length: int, batch: int, cache: str) -> dict[str, Any]:
        """Look a row up in the record; if the record has none, measure the row and record it.

        Args:
            method: "full", or a name of `experiments.lab.peers.PRESSES`.
            length: tokens of the prompt.
            batch: rows.
            cache: "static" or "dynamic".
        """
        settings = self.settings
        compiled = settings.mode if cache == "static" else "no"
        budget = 0 if method == "full" else budget_at(method, length)
        identity = {"name": "decode", "model": settings.model, "method": method, "length": length, "batch": batch}
        identity |= {"budget": budget, "cache": cache, "compiled": compiled, "attention": settings.attention}
        known = self.results.find(identity)
        if known is not None and (known["error"] is None or known["out_of_memory"]):
            print(f"{report.line(known)}, from the record", flush=True)
            return known
        error, full, missing, begun = None, False, False, time.monotonic()
        try:
            measured = self._measure(method, length, batch, cache, budget)
        except Exception as problem:  # the other rows are still wanted
            full, missing = _is_memory(problem), isinstance(problem, MissingPeerError)
            error = str(problem) if missing else f"{type(problem).__name__}: {problem}"[:2000]
            measured = {"value": None, "unit": "s/token"}
            self.failed += not (full or missing)
        torch.compiler.reset()  # compiled programs and graphs hold the cache's memory
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        row = {
            **identity,
            **measured,
            "error": error,
            "out_of_memory": full,
            "missing": missing,
            "note": _note(method, cache),
            "run": self.run,
            "wall_seconds": time.monotonic() - begun,
        }
        self.results.add(row, identity)
        print(report.line(row), flush=True)
        return row

    def _measure(self, method: str, length: int, batch: int, cache: str, budget: int) -> Mapping[str, Any]:
        settings, model = self.settings, self.model
        if method == "full":
            stored, layers = length, filled_cache.random_layers(model, batch, length)
        else:
            stored, layers = budget, filled_cache.pressed_layers(model, method, batch, length, budget)
        if cache == "static":
            filled = filled_cache.static_cache(model, layers, batch, stored, settings.room)
        else:
            filled = filled_cache.dynamic_cache(model, layers)
        size = filled_cache.num_bytes(filled)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        took = decode_times(
            model,
            filled,
            batch=batch,
            length=stored,
            tokens=settings.tokens,
            repeats=settings.repeats,
            compiled=settings.mode if cache == "static" else None,
        )
        seconds = statistics.median(took.spans)
        return {
            "value": seconds,
            "unit": "s/token",
            "least": min(took.spans),
            "most": max(took.spans),
            "repeats": settings.repeats,
            "tokens": settings.tokens,
            "tokens_per_second": batch / seconds,
            "compile_seconds": took.compile if cache == "static" else None,
            "stored_tokens": stored,
            "weight_bytes": random_model.num_bytes(model),
            "cache_bytes": size,
            "peak_bytes": torch.cuda.max_memory_allocated(self.device) if on_gpu else None,
        }


def _is_memory(error: BaseException | None) -> bool:
    """Say whether an error means that memory ran out, or was caused by such an error, which a compiler wraps."""
    while error is not None:
        if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _note(method: str, cache: str) -> str:
    """Describe what a reader must know about a row."""
    if method == "full":
        return "" if cache == "static" else "generate's default cache"
    if cache == "static":
        return "what the press left, moved to a static cache, which kvpress does not do"
    return "what the press left, then plain generate"
