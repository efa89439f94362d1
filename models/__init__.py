"""Decoders with parameters as plain JAX arrays: the families of `models.family_table`, one module made of the same parts."""

from __future__ import annotations

from . import shapes as shapes
from .adapter import apply_adapter
from .builtin_model import builtin_directory
from .chat import ChatTemplate
from .config import ModelConfig
from .experts import Experts
from .hub import checkpoint_directory
from .linear.sizes import LinearLayers
from .loaded import Loaded, load
from .named_models import NAMED_MODELS, ModelFile, NamedModel, Piece
from .parts import LayerRope
from .rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, YarnScaling
from .sharding import param_specs, shard_params
from .tokenizer import as_tokenizer, load_tokenizer, special_tokens
from .transformer import Transformer
from .weights import from_pretrained, param_shapes, random_params, save_pretrained

__all__ = [
    "ChatTemplate",
    "DynamicScaling",
    "Experts",
    "LayerRope",
    "LinearLayers",
    "LinearScaling",
    "Loaded",
    "LongRopeScaling",
    "ModelConfig",
    "ModelFile",
    "NAMED_MODELS",
    "NamedModel",
    "Piece",
    "RopeScaling",
    "Transformer",
    "YarnScaling",
    "apply_adapter",
    "as_tokenizer",
    "builtin_directory",
    "checkpoint_directory",
    "from_pretrained",
    "load",
    "load_tokenizer",
    "param_shapes",
    "param_specs",
    "random_params",
    "save_pretrained",
    "shard_params",
    "special_tokens",
]
