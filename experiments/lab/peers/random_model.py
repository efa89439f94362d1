"""A model of transformers with random weights, made on the device: nothing is downloaded. This file needs torch."""

from __future__ import annotations

import torch
import transformers

from models import ModelConfig


def random_model(config: ModelConfig, attention: str, device: torch.device) -> transformers.PreTrainedModel:
    """Make a model of the shape's own class in transformers (Llama, Qwen3, ...), in the shape's dtype.

    Args:
        config: the shape.
        attention: transformers' name of the attention.
        device: where the weights are made.

    Raises:
        ImportError: the attention needs a package that is not installed.
        ValueError: transformers does not know the attention.
    """
    # No token ends a generation: every repeat decodes the same number of tokens.
    described = {**config.to_hf(), "eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    of_shape = transformers.AutoConfig.for_model(**described)
    dtype = getattr(torch, config.dtype)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(of_shape, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


def num_bytes(model: transformers.PreTrainedModel) -> int:
    """Count the bytes of the parameters; tied parameters count once."""
    return sum(x.numel() * x.element_size() for x in model.parameters())
