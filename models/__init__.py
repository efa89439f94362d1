"""Decoders with parameters as plain JAX arrays: the families of `models.files.tables.family_table`, one module made of the same parts."""

from __future__ import annotations

from .files.adapter import apply_adapter
from .files.weights import from_pretrained, param_shapes, random_params, save_pretrained
from .hub.builtin_model import builtin_directory
from .hub.directories import checkpoint_directory
from .hub.named_models import NAMED_MODELS, ModelFile, NamedModel, Piece
from .layers.experts import Experts
from .layers.transformer import Transformer
from .loaded import Loaded, load
from .sharding import param_specs, shard_params
from .sizes import shapes as shapes
from .sizes.config import ModelConfig
from .sizes.linear import LinearLayers
from .sizes.parts import LayerRope
from .sizes.rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, YarnScaling
from .text.chat import ChatTemplate
from .text.tokenizer import as_tokenizer, load_tokenizer, special_tokens

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
