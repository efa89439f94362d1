"""Answers to prompts under presses of kvpress, scored: a row for each task and method. This file needs torch.

Each prompt is prefilled under each press by kvpress's own context. Its answer is decoded greedily over what the press kept,
at the positions that follow the prompt's true length, as in kvpress's own pipeline.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import transformers

from experiments.answering import LoadedModel
from experiments.benchmarks import score
from experiments.evaluation.answers import answer_text
from experiments.lab.peers.quality.prompts import Asked, scored
from experiments.lab.peers.quality.settings import PRESSES, PeersSettings
from experiments.lab.peers.torch_device import begin_run, free_memory, make_press
from experiments.records import Results
from experiments.speed.rows import failure


class Bench:
    """The answers of one model under transformers and kvpress.

    Args:
        settings: which methods.
        results: the record, which is read first and written after every row.
        model: the tokenizer and the configuration.
        device: where the model runs.

    Attributes:
        failed: rows that ended with an error.
    """

    def __init__(self, settings: PeersSettings, results: Results, model: LoadedModel, device: torch.device) -> None:
        self.settings, self.results, self.tokenizer, self.config = settings, results, model.tokenizer, model.config
        self.failed = 0
        transformers.utils.logging.set_verbosity_error()
        logging.getLogger("kvpress").setLevel(logging.ERROR)  # KVzip warns of its cost at every prompt
        self._model, self._device = load(str(model.directory), settings.attention, model.config.dtype, device), device
        self._run = begin_run(results, device)

    def cell(self, asked: Asked) -> None:
        """Answer a cell under every method whose row is not in the record, and record each row.

        Args:
            asked: the cell's prompts.
        """
        for ours in asked.ours:
            self.results.add({**ours, "run": self._run}, _identity(ours))
        for method in self.settings.methods:
            self._row(asked, method)

    def _row(self, asked: Asked, method: str) -> None:
        encoded = asked.encoded
        row: dict[str, Any] = {
            "name": encoded.cell.task,
            "length": encoded.cell.length,
            "library": "transformers" if method == "full" else "kvpress",
            "method": method,
            "base": method,
            "budget": asked.budget,
        }
        known = self.results.find(_identity(row))
        if known is not None and known["error"] is None and known["scores"].keys() == set(encoded.keys):
            print(f"{_line(known)}, from the record", flush=True)
            return
        begun = time.monotonic()
        try:
            row |= {**self._scored(asked, method), "error": None}
        except Exception as error:  # the other rows are still wanted
            row |= {"value": None, "unit": "percent", "samples": len(encoded.keys)}
            row["error"] = f"{type(error).__name__}: {error}"[:2000]
            self.failed += 1
        free_memory(self._device)
        row |= {"run": self._run, "seconds": round(time.monotonic() - begun, 2)}
        self.results.add(row, _identity(row))
        print(_line(row), flush=True)

    def _scored(self, asked: Asked, method: str) -> dict[str, Any]:
        encoded, ends = asked.encoded, self.config.eos_token_ids
        texts, kept = [], []
        for ids, example in zip(encoded.wholes, encoded.examples, strict=True):
            limit = asked.new_tokens or example.max_new_tokens
            press = None if method == "full" else make_press(PRESSES[method][0], len(ids), asked.budget)
            answer, tokens = answer_prompt(self._model, ids, press, limit, ends)
            texts.append(answer_text(self.tokenizer, answer, limit, ends, example.stop))
            kept.append(tokens)
        scores = [round(score(example, text), 6) for example, text in zip(encoded.examples, texts, strict=True)]
        return {
            **scored(encoded, scores),
            "kept_tokens": round(float(np.mean(kept)), 1),
            "answers": dict(zip(encoded.keys, texts, strict=True)),
        }


def _identity(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("name", "length", "library", "method", "budget")}


def _line(row: Mapping[str, Any]) -> str:
    """Format a row as a printed line."""
    begin = f"{row['library']:12s} {row['method']:18s} {row['name']:18s}"
    if row["error"] is not None:
        return f"{begin} FAILED: {failure(row)}"
    return f"{begin} {row['value']:6.2f}  kept {row['kept_tokens']:.1f}  {row['seconds']:.1f} s"


def load(directory: str, attention: str, dtype: str, device: torch.device) -> transformers.PreTrainedModel:
    """Load a model from a directory in Hugging Face's layout.

    Args:
        directory: the directory.
        attention: transformers' name of the attention.
        dtype: of weights and computation.
        device: where the model goes.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation=attention
    )
    return model.to(device).eval().requires_grad_(False)


@torch.no_grad()
def answer_prompt(
    model: transformers.PreTrainedModel, ids: Sequence[int], press: Any, limit: int, ends: Sequence[int]
) -> tuple[list[int], float]:
    """Prefill a prompt under a press, and generate the greedy answer over what the press kept.

    Args:
        model: the model.
        ids: the prompt.
        press: a press of kvpress; None keeps all tokens.
        limit: most tokens of the answer.
        ends: tokens that end the answer.

    Returns:
        The token ids of the answer, a closing end included, and the tokens that a query sees of the prompt: the mean over
        layers and KV heads.
    """
    cache = transformers.DynamicCache()
    prompt = torch.tensor([list(ids)], device=model.device)
    try:
        # KVzip rereads the prompt when its context ends, and gets its positions then as it does alone.
        with contextlib.nullcontext() if press is None else press(model), _positions_told(model, len(ids)):
            # kvpress's own pipeline names both arguments too: its KVzip reads them by name.
            logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
        kept = _kept_tokens(model, cache)
        answer = [int(logits[0, -1].argmax())]
        while len(answer) < limit and answer[-1] not in ends:
            token, position = torch.tensor([[answer[-1]], [len(ids) + len(answer) - 1]], device=model.device)
            more = {"past_key_values": cache, "position_ids": position[None]}
            answer.append(int(model(input_ids=token[None], **more).logits[0, -1].argmax()))
    finally:
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None  # of the next prompt none are masked
    return answer, kept


@contextlib.contextmanager
def _positions_told(model: transformers.PreTrainedModel, length: int) -> Iterator[None]:
    """Pass the positions by which presses know a prefill: transformers 5.3 and later no longer do."""

    def add(module: torch.nn.Module, inputs: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return inputs, {**kwargs, "cache_position": torch.arange(length, device=model.device)}

    hooks = [x.self_attn.register_forward_pre_hook(add, with_kwargs=True) for x in model.model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _kept_tokens(model: transformers.PreTrainedModel, cache: transformers.DynamicCache) -> float:
    """Count the tokens that are seen, the mean over layers and KV heads; KVzip masks tokens instead of dropping them."""
    heads = seen = 0
    for layer, attention in zip(cache.layers, (x.self_attn for x in model.model.layers), strict=True):
        masked = getattr(attention, "masked_key_indices", None)
        heads += layer.keys.shape[1]
        seen += layer.keys.shape[1] * layer.keys.shape[2] - (0 if masked is None else len(masked[2]))
    return seen / heads
