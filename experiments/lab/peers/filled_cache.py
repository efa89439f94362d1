"""Caches as prefill would leave them, without a prefill: random keys and values. This file needs torch.

The time of a step does not depend on the values. Beside keys and values, transformers' static cache needs the length, which
each layer counts in a tensor of its own (`cumulative_length`). The tensor stays where it is, because compiled programs and
CUDA graphs hold its address.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import transformers

from experiments.lab.peers.settings import PRESSES

Layer = tuple[torch.Tensor, torch.Tensor]  # keys and values, [B, H, S, D] each


class MissingPeerError(Exception):
    """kvpress is not installed, or cannot be imported."""


def make_press(name: str, length: int, budget: int) -> Any:
    """Make a press with kvpress's defaults, which keeps ``budget`` of ``length`` tokens.

    kvpress wraps the attention functions of transformers when it is imported, so rows without it run first.

    Raises:
        MissingPeerError: kvpress cannot be imported.
        ValueError: the prompt has no more tokens than the budget.
    """
    try:
        import kvpress
    except ModuleNotFoundError as error:
        if error.name == "kvpress":
            raise MissingPeerError("kvpress is not installed: pip install kvpress") from error
        raise MissingPeerError(f"kvpress needs {error.name}, which is not installed") from error
    except ImportError as error:
        raise MissingPeerError(f"kvpress cannot be imported: {error}") from error
    if length <= budget:
        raise ValueError(f"a prompt must have more tokens than the budget of {budget}, got {length}")
    # kvpress keeps int(length * (1 - ratio)) tokens; the half makes this the budget, however the products are rounded.
    return getattr(kvpress, name)(compression_ratio=1 - (budget + 0.5) / length)


def random_layers(model: transformers.PreTrainedModel, batch: int, length: int) -> Iterator[Layer]:
    """Draw random keys and values [B, H, S, D] of every layer."""
    config = model.config
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    for _ in range(config.num_hidden_layers):
        yield tuple(torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))


def pressed_layers(model: transformers.PreTrainedModel, method: str, batch: int, length: int, budget: int) -> Iterator[Layer]:
    """Yield the keys and values [B, H, budget, D] that a press of kvpress keeps of every layer.

    A press compresses each layer once, at the prompt's end. From then on, plain `generate` decodes over the tokens that the
    press kept and the new tokens. So the press's own `compress` runs here on random hidden states, keys and values of the
    prompt's length, and there is no prefill.

    Args:
        model: gives the layers, whose projections some presses use.
        method: see `PRESSES`.
        batch: rows.
        length: tokens of the prompt.
        budget: tokens that are kept per KV head.

    Raises:
        MissingPeerError: kvpress cannot be imported.
    """
    press = make_press(PRESSES[method], length, budget)
    hidden = torch.randn((batch, length, model.config.hidden_size), dtype=model.dtype, device=model.device)
    positions = torch.arange(length, device=model.device)[None]
    more = {"position_embeddings": model.model.rotary_emb(hidden, positions)}
    with torch.no_grad(), press(model):
        for layer, (keys, values) in zip(model.model.layers, random_layers(model, batch, length), strict=True):
            yield press.compress(layer.self_attn, hidden, keys, values, None, more)


def static_cache(
    model: transformers.PreTrainedModel, layers: Iterable[Layer], batch: int, length: int, room: int
) -> transformers.StaticCache:
    """Make a static cache that holds ``length`` tokens and has room for ``room`` more."""
    config = model.config
    cache = transformers.StaticCache(config=config, max_cache_len=length + room)
    cache.early_initialization(batch, config.num_key_value_heads, config.head_dim, model.dtype, model.device)
    for layer, (keys, values) in zip(cache.layers, layers, strict=True):
        layer.keys[:, :, :length].copy_(keys)
        layer.values[:, :, :length].copy_(values)
        layer.cumulative_length.fill_(length)
    return cache


def dynamic_cache(model: transformers.PreTrainedModel, layers: Iterable[Layer]) -> transformers.DynamicCache:
    """Make a cache that grows with every token, by copying all that it holds."""
    cache = transformers.DynamicCache(config=model.config)
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def num_bytes(cache: transformers.Cache) -> int:
    """Count the bytes of the keys and values."""
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
