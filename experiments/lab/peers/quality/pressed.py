"""Prompts under presses of kvpress, and answers over what the presses kept. This file needs torch and transformers.

A press compresses a layer when the layer has attended to the prompt, and leaves the attention as it was. So a prompt is
prefilled once: after each layer every press's own hook runs on a copy of the layer's keys and values. KVzip rereads the
prompt afterwards, over the whole cache. The answers of a cell are decoded together, each at its own positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import transformers

from experiments.lab.peers.quality.settings import PRESSES

Layer = tuple[torch.Tensor, torch.Tensor]


class MissingPeerError(Exception):
    """A peer is not installed, or cannot be imported."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a press left of one prompt.

    Attributes:
        layers: keys and values [1, H, S, D] of each layer.
        masked: for each layer the heads and the slots that no query sees, two int64 tensors; None if all slots are seen.
    """

    layers: list[Layer]
    masked: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    @property
    def tokens(self) -> float:
        """Tokens that are seen, the mean over layers and KV heads."""
        seen = sum(keys.shape[1] * keys.shape[2] for keys, _ in self.layers)
        gone = sum(len(slots) for _, slots in self.masked or ())
        return (seen - gone) / sum(keys.shape[1] for keys, _ in self.layers)


@dataclasses.dataclass(frozen=True)
class Read:
    """A prompt that was prefilled.

    Attributes:
        first: the first token of the answer, which the prompt's dense attention gives.
        length: tokens of the prompt.
        kept: what is left under each method.
        errors: the error of each method that failed.
    """

    first: int
    length: int
    kept: dict[str, Kept]
    errors: dict[str, str]


def kvpress() -> ModuleType:
    """Import kvpress.

    Raises:
        MissingPeerError: kvpress cannot be imported.
    """
    try:
        import kvpress
    except ImportError as error:
        raise MissingPeerError(f"kvpress cannot be imported: {error}") from error
    return kvpress


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


def make_press(peer: ModuleType, method: str, length: int, budget: int) -> Any:
    """Make a press with kvpress's defaults, which keeps `budget` of `length` tokens.

    Raises:
        ValueError: the prompt has no more tokens than the budget.
    """
    if length <= budget:
        raise ValueError(f"a prompt must have more tokens than the budget of {budget}, got {length}")
    # kvpress keeps int(length * (1 - ratio)) tokens; the half makes this the budget, however the products are rounded.
    return getattr(peer, PRESSES[method][0])(compression_ratio=1 - (budget + 0.5) / length)


@torch.no_grad()
def read_prompt(
    model: transformers.PreTrainedModel, ids: Sequence[int], presses: Mapping[str, Any], *, full: bool = True
) -> Read:
    """Prefill one prompt under presses.

    Args:
        model: the model.
        ids: the prompt.
        presses: the press of each method, made for this prompt.
        full: whether the whole cache is kept, as the method "full".

    Raises:
        RuntimeError: the prompt could not be prefilled. (A press that fails is an entry of `Read.errors`.)
    """
    errors: dict[str, str] = {}
    cache = transformers.DynamicCache()
    prompt = torch.tensor([list(ids)], device=model.device)
    copies = {method: transformers.DynamicCache() for method in presses if method != "kvzip"}
    logits = None
    try:
        with presses["kvzip"](model) if "kvzip" in presses else contextlib.nullcontext():
            with _hooks(model, cache, {method: (presses[method], copy) for method, copy in copies.items()}, errors):
                # kvpress's own pipeline names both arguments too: its KVzip reads them by name.
                logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits
        masked = [_take_masked(layer.self_attn, prompt.device) for layer in model.model.layers]
    except Exception as error:  # the other presses have what they need, unless the prefill itself failed
        if "kvzip" not in presses or logits is None:
            raise
        errors["kvzip"] = f"{type(error).__name__}: {error}"[:2000]
    layers = [(layer.keys[:, :, : len(ids)], layer.values[:, :, : len(ids)]) for layer in cache.layers]
    kept = {method: Kept(_layers(copy)) for method, copy in copies.items() if method not in errors}
    if "kvzip" in presses and "kvzip" not in errors:
        kept["kvzip"] = Kept(layers, masked)
    if full:
        kept["full"] = Kept(layers)
    return Read(int(logits[0, -1].argmax()), len(ids), kept, errors)


@contextlib.contextmanager
def _hooks(
    model: transformers.PreTrainedModel,
    cache: transformers.DynamicCache,
    presses: Mapping[str, tuple[Any, transformers.DynamicCache]],
    errors: dict[str, str],
) -> Iterator[None]:
    """Run the hook of every press after every layer, on a cache of its own; note the first error of each press."""

    def hook(module: torch.nn.Module, inputs: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        layer = cache.layers[module.layer_idx]
        # transformers 5.3 and later no longer pass the positions by which presses know a prefill.
        given = {**kwargs, "cache_position": torch.arange(layer.keys.shape[2], device=layer.keys.device)}
        for method, (press, copy) in presses.items():
            if method in errors:
                continue
            try:
                copy.update(layer.keys, layer.values, module.layer_idx)
                press.forward_hook(module, inputs, {**given, "past_key_values": copy}, output)
            except Exception as error:  # the other presses are still wanted
                errors[method] = f"{type(error).__name__}: {error}"[:2000]

    handles = []
    try:
        for press, _ in presses.values():
            press.post_init_from_model(model)
        for layer in model.model.layers:
            layer.self_attn.rotary_emb = model.model.rotary_emb  # as BasePress does
            handles.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(cache: transformers.DynamicCache) -> list[Layer]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _take_masked(module: torch.nn.Module, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Take from an attention module the heads and slots that kvpress masks in it; afterwards it masks none."""
    found, module.masked_key_indices = getattr(module, "masked_key_indices", None), None
    if found is None:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return nothing, nothing
    _, heads, slots = found
    return heads.to(device), slots.to(device)


def decode(
    model: transformers.PreTrainedModel,
    reads: Sequence[Read],
    method: str,
    limits: Sequence[int],
    ends: Sequence[int],
) -> list[list[int]]:
    """Generate the greedy answers to some prompts together, at the positions that follow each prompt's true length.

    Args:
        model: the model.
        reads: the prompts.
        method: the method whose cache is continued.
        limits: most tokens of each answer.
        ends: tokens that end an answer.

    Returns:
        The token ids of each answer, a closing end included.
    """
    # One mask serves all layers. So caches whose layers differ in length go together only if they differ in the same way.
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, read in enumerate(reads):
        sizes = tuple(keys.shape[2] for keys, _ in read.kept[method].layers)
        groups.setdefault(sizes if len(set(sizes)) > 1 else (), []).append(row)
    answers: dict[int, list[int]] = {}
    for rows in groups.values():
        made = _decode(model, [reads[row] for row in rows], method, [limits[row] for row in rows], ends)
        answers.update(zip(rows, made, strict=True))
    return [answers[row] for row in range(len(reads))]


@torch.no_grad()
def _decode(
    model: transformers.PreTrainedModel,
    reads: Sequence[Read],
    method: str,
    limits: Sequence[int],
    ends: Sequence[int],
) -> list[list[int]]:
    """Run `decode` for caches that can be joined."""
    cache, mask = _join(model, [read.kept[method] for read in reads])
    tokens = torch.tensor([read.first for read in reads], device=model.device)
    lengths = torch.tensor([read.length for read in reads], device=model.device)
    answers = [[read.first] for read in reads]
    try:
        for step in range(max(limits) - 1):
            going = [a[-1] not in ends and len(a) < limit for a, limit in zip(answers, limits, strict=True)]
            if not any(going):
                break
            if mask is not None:
                mask = torch.cat([mask, mask.new_ones((len(reads), 1))], dim=1)
            more = {"past_key_values": cache, "position_ids": (lengths + step)[:, None], "attention_mask": mask}
            tokens = model(input_ids=tokens[:, None], **more).logits[:, -1].argmax(dim=-1)
            for answer, token, goes in zip(answers, tokens.tolist(), going, strict=True):
                if goes:
                    answer.append(token)
    finally:
        for layer in model.model.layers:
            layer.self_attn.masked_key_indices = None
    return answers


def _join(
    model: transformers.PreTrainedModel, kept: Sequence[Kept]
) -> tuple[transformers.DynamicCache, torch.Tensor | None]:
    """Put the caches of some prompts into one, and mask in the model what they mask.

    Returns:
        The cache, and the mask of its slots, int64 [B, S]: caches of different lengths are padded on the left. None if
        all caches are equally long.
    """
    cache, mask = transformers.DynamicCache(), None
    for number, layer in enumerate(model.model.layers):
        sizes = [one.layers[number][0].shape[2] for one in kept]
        pads = [max(sizes) - size for size in sizes]
        keys, values = (
            torch.cat([_padded(one.layers[number][part], pad) for one, pad in zip(kept, pads, strict=True)])
            for part in (0, 1)
        )
        cache.update(keys, values, number)
        if any(pads):
            slots = torch.arange(max(sizes), device=keys.device)[None]
            mask = (slots >= torch.tensor(pads, device=keys.device)[:, None]).to(torch.int64)
        if kept[0].masked is not None:
            found = [one.masked[number] for one in kept]
            rows = [torch.full_like(heads, row) for row, (heads, _) in enumerate(found)]
            moved = [at + pad for (_, at), pad in zip(found, pads, strict=True)]
            layer.self_attn.masked_key_indices = (torch.cat(rows), torch.cat([h for h, _ in found]), torch.cat(moved))
    return cache, mask


def _padded(part: torch.Tensor, pad: int) -> torch.Tensor:
    """Put ``pad`` slots of zeros before the slots of keys or values [1, H, S, D]."""
    return torch.nn.functional.pad(part, (0, 0, pad, 0))
