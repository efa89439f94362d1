"""The rows of a process: one for each task and method. This file needs torch and transformers."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers

from experiments.answering import LoadedModel
from experiments.benchmarks import score
from experiments.evaluation.answers import answer_text
from experiments.lab.peers.quality import pressed, report
from experiments.lab.peers.quality.prompts import Asked, scored
from experiments.lab.peers.quality.settings import PeersSettings
from experiments.records import Results, commit, describe_device, versions

PACKAGES = ("torch", "transformers", "kvpress", "flash-attn")
_TRIED = 512  # tokens of the prompt on which every method is tried first


class Bench:
    """The answers of one model under transformers and kvpress.

    Args:
        settings: which methods.
        results: the record, which is read first and written after every row.
        model: the tokenizer and the configuration.
        device: where the model runs.
        run: the name of this run in the record.

    Attributes:
        failed: rows that ended with an error.
    """

    def __init__(
        self, settings: PeersSettings, results: Results, model: LoadedModel, device: torch.device, run: str
    ) -> None:
        self.settings, self.results, self.tokenizer, self.config = settings, results, model.tokenizer, model.config
        self.failed, self._run, self._begun = 0, run, time.monotonic()
        self._peer, self._missing = _import(settings.methods)
        self._say(f"kvpress: {self._missing or versions(PACKAGES).get('kvpress', 'of no known version')}")
        self._model = pressed.load(str(model.directory), settings.attention, model.config.dtype, device)
        self._device = device
        self._say("loaded the model")
        about = {"commit": commit(), "versions": versions(PACKAGES), "device": describe_device(device)["kind"]}
        results.change("runs", lambda runs: {**(runs or {}), run: about})

    def try_methods(self, asked: Asked) -> None:
        """Answer the end of one prompt under every method with four tokens, and say which methods fail."""
        whole = asked.encoded.wholes[0]
        ids = whole[-min(_TRIED, len(whole)) :]
        methods = self._able(self.settings.methods)
        read = self._read(ids, methods, len(ids) // 4)
        for method in methods:
            try:
                if method in read.errors:
                    raise RuntimeError(read.errors[method])
                pressed.decode(self._model, [read], method, [4], ())
                said = f"runs, keeps {read.kept[method].tokens:.1f} of {len(ids)} tokens"
            except Exception as error:  # the row of this method will say so
                said = f"FAILS: {error}"[:300]
            self._say(f"{method:18s} {said}")

    def cell(self, asked: Asked) -> None:
        """Answer a cell under every method whose row is not in the record, and record each row.

        Args:
            asked: the cell's prompts.
        """
        for ours in asked.ours:
            self.results.add({**ours, "run": self._run}, _identity(ours))
        encoded, budget = asked.encoded, asked.budget
        todo = [method for method in self.settings.methods if not self._known(asked, method)]
        methods = self._able(todo)
        reads: list[pressed.Read] = []
        problem, begun = self._missing, time.monotonic()
        try:
            for ids in encoded.wholes if methods else ():
                reads.append(self._read(ids, methods, budget))
        except Exception as error:  # other cells are still wanted
            problem, reads = f"{type(error).__name__}: {error}"[:2000], []
        took = time.monotonic() - begun
        self._say(f"{encoded.cell.title}: {len(reads)} prompts prefilled under {len(methods)} methods in {took:.1f} s")
        for method in todo:
            errors = [read.errors[method] for read in reads if method in read.errors]
            self._row(asked, method, reads, errors[0] if errors else None if reads else problem, took)
        del reads
        self._free()

    def _row(self, asked: Asked, method: str, reads: Sequence[pressed.Read], problem: str | None, took: float) -> None:
        """Decode and score a cell under a method, and record the row; ``problem`` is an error that came before."""
        begun, encoded, told = time.monotonic(), asked.encoded, {}
        if problem is None:
            try:
                told = self._scored(asked, method, reads)
            except Exception as error:  # the other rows are still wanted
                problem = f"{type(error).__name__}: {error}"[:2000]
        self._free()
        empty = {"name": encoded.cell.task, "length": encoded.cell.length, "value": None, "unit": "percent"}
        row = {
            **(told or {**empty, "samples": len(encoded.keys)}),
            "library": "transformers" if method == "full" else "kvpress",
            "method": method,
            "base": method,
            "budget": asked.budget,
            "error": problem,
            "run": self._run,
            "prefill_seconds": round(took, 2),  # of all methods of the cell together
            "decode_seconds": round(time.monotonic() - begun, 2),
        }
        self.failed += problem is not None
        self.results.add(row, _identity(row))
        self._say(report.line(row))

    def _scored(self, asked: Asked, method: str, reads: Sequence[pressed.Read]) -> dict[str, Any]:
        encoded, ends = asked.encoded, self.config.eos_token_ids
        limits = [asked.new_tokens or example.max_new_tokens for example in encoded.examples]
        made = pressed.decode(self._model, reads, method, limits, ends)
        texts = [
            answer_text(self.tokenizer, ids, limit, ends, example.stop)
            for ids, limit, example in zip(made, limits, encoded.examples, strict=True)
        ]
        scores = [round(score(example, text), 6) for example, text in zip(encoded.examples, texts, strict=True)]
        return {
            **scored(encoded, scores),
            "kept_tokens": round(float(np.mean([read.kept[method].tokens for read in reads])), 1),
            "answers": dict(zip(encoded.keys, texts, strict=True)),
        }

    def _read(self, ids: Sequence[int], methods: Sequence[str], budget: int) -> pressed.Read:
        presses = {m: pressed.make_press(self._peer, m, len(ids), budget) for m in methods if m != "full"}
        return pressed.read_prompt(self._model, ids, presses, full="full" in methods)

    def _able(self, methods: Sequence[str]) -> list[str]:
        """Leave out the presses if kvpress is missing."""
        return [method for method in methods if method == "full" or self._peer]

    def _known(self, asked: Asked, method: str) -> bool:
        library = "transformers" if method == "full" else "kvpress"
        cell = {"name": asked.encoded.cell.task, "length": asked.encoded.cell.length}
        row = self.results.find(_identity({**cell, "library": library, "method": method, "budget": asked.budget}))
        done = row is not None and row["error"] is None and row["scores"].keys() == set(asked.encoded.keys)
        if done:
            self._say(f"{report.line(row)}, from the record")
        return done

    def _free(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._begun:7.1f} s  {text}", flush=True)


def _identity(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("name", "length", "library", "method", "budget")}


def _import(methods: Sequence[str]) -> tuple[ModuleType | Any, str | None]:
    """Import kvpress if a press is wanted; return it, and the error if it cannot be imported."""
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip warns of its cost at every prompt
    if all(method == "full" for method in methods):
        return None, None
    try:
        return pressed.kvpress(), None
    except pressed.MissingPeerError as error:
        return None, str(error)
