"""The keys and values that a press of kvpress keeps of a prompt, layer by layer. This file needs torch.

A press compresses each layer once, at the prompt's end. From then on, plain `generate` decodes over the tokens that the press
kept and the new tokens. So the press's own `compress` runs here on random hidden states, keys and values of the prompt's
length, and there is no prefill.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
import transformers

from experiments.lab.peers.speed.filled_cache import Layer, random_layers
from experiments.lab.peers.speed.settings import PRESSES


class MissingPeerError(Exception):
    """A peer is not installed, or cannot be imported."""


def kvpress() -> ModuleType:
    """Import the package kvpress, which wraps the attention functions of transformers, so rows without it run first.

    Raises:
        MissingPeerError: kvpress cannot be imported.
    """
    try:
        import kvpress
    except ModuleNotFoundError as error:
        if error.name == "kvpress":
            raise MissingPeerError("kvpress is not installed: pip install kvpress") from error
        raise MissingPeerError(f"kvpress needs {error.name}, which is not installed") from error
    except ImportError as error:
        raise MissingPeerError(f"kvpress cannot be imported: {error}") from error
    return kvpress


def pressed_layers(
    model: transformers.PreTrainedModel, method: str, batch: int, length: int, budget: int
) -> Iterator[Layer]:
    """Yield the keys and values [B, H, budget, D] that a press keeps of every layer.

    Args:
        model: gives the layers, whose projections some presses use.
        method: see `PRESSES`.
        batch: rows.
        length: tokens of the prompt.
        budget: tokens that are kept per KV head.

    Raises:
        MissingPeerError: kvpress cannot be imported.
    """
    # kvpress keeps int(length * (1 - ratio)) tokens; the half makes this the budget, however the products are rounded.
    press = getattr(kvpress(), PRESSES[method])(compression_ratio=1 - (budget + 0.5) / length)
    hidden = torch.randn((batch, length, model.config.hidden_size), dtype=model.dtype, device=model.device)
    positions = torch.arange(length, device=model.device)[None]
    more = {"position_embeddings": model.model.rotary_emb(hidden, positions)}
    with torch.no_grad(), press(model):
        for layer, (keys, values) in zip(model.model.layers, random_layers(model, batch, length), strict=True):
            yield press.compress(layer.self_attn, hidden, keys, values, None, more)
