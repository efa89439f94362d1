"""Decoders with parameters as plain JAX arrays: one module made of parts, for every family of `models.files.tables`."""

from . import shapes as shapes
from .config import ModelConfig
from .files.adapter import apply_adapter
from .files.directories import checkpoint_directory
from .hub.named_models import NAMED_MODELS, ModelFile, NamedModel, Piece, builtin_directory
from .layers.transformer import Transformer
from .loaded import Loaded, load
from .sharding import param_specs, shard_params
from .sizes.experts import Experts
from .sizes.linear import LinearLayers
from .sizes.parts import LayerRope
from .sizes.rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeScaling, YarnScaling
from .text.chat import ChatTemplate
from .text.tokenizer import as_tokenizer, load_tokenizer, special_tokens
from .weights import from_pretrained, param_shapes, random_params, read_config, save_pretrained

__all__ = [
    "ChatTemplate", "DynamicScaling", "Experts", "LayerRope", "LinearLayers", "LinearScaling", "Loaded", "LongRopeScaling",
    "ModelConfig", "ModelFile", "NAMED_MODELS", "NamedModel", "Piece", "RopeScaling", "Transformer", "YarnScaling",
    "apply_adapter", "as_tokenizer", "builtin_directory", "checkpoint_directory", "from_pretrained", "load",
    "load_tokenizer", "param_shapes", "param_specs", "random_params", "read_config", "save_pretrained", "shard_params",
    "special_tokens",
]  # fmt: skip
