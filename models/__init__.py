"""Decoders in plain JAX parameters: Llama 3.x, Qwen2/2.5, Qwen3, Mistral and Yi."""

from __future__ import annotations

from .builtin_model import builtin_directory
from .config import ModelConfig, RopeScaling
from .tokenizer import load_tokenizer
from .transformer import Transformer
from .weights import from_pretrained, param_shapes, random_params, save_pretrained

__all__ = [
    "ModelConfig",
    "RopeScaling",
    "Transformer",
    "builtin_directory",
    "from_pretrained",
    "load_tokenizer",
    "param_shapes",
    "random_params",
    "save_pretrained",
]
