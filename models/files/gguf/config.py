"""The configuration of a decoder from the metadata of a GGUF file.

A setting that this decoder does not compute is an error here, so that a file never runs as a slightly different model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...sizes.architecture import Architecture
from ..hf import config as hf_config
from ..hf.families import SIZES
from . import families, qwen3next
from .reader import GGUFFile
from .rope import scaling_from_factors

_PLAIN = ("llama", "qwen2", "qwen3")  # llama.cpp writes Mistral, Yi and SmolLM2 as llama
_PARTIAL = ("phi3", qwen3next.ARCHITECTURE)  # which rotate a part of each head
ARCHITECTURES = (*_PLAIN, *families.ARCHITECTURES)
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
_SIZES = {  # key after the architecture's name -> our field
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_layers",
    "attention.head_count": "num_q_heads",
    "context_length": "max_position_embeddings",
}
_EPS = "attention.layer_norm_rms_epsilon"
_NEUTRAL: dict[str, tuple] = {  # keys that can change the arithmetic -> values that leave it unchanged
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.scale": (),
    "attention.sliding_window_pattern": (),
    "attention.temperature_scale": (),
    "attention.temperature_length": (),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "no_rope_layer_step": (),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "nextn_predict_layers": (0,),
}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<end_of_turn>",
    "<|return|>",
    "<|call|>",
)  # llama.cpp knows these by their text, because older files have no key for them


def read_config(file: GGUFFile, dtype: str | None = None) -> Architecture:
    """Read the configuration of the model in ``file``.

    Embeddings are tied if the file has no ``output.weight``. A text ends with any token that the metadata names as end of
    text, of a turn or of a message, and with ``<|eot_id|>``, ``<|im_end|>`` and their like (`_END_OF_TURN`).

    Args:
        file: an open GGUF file.
        dtype: dtype of computation. None takes bfloat16 if the file's embedding is stored in bfloat16, and float32
            otherwise, also for quantised files.

    Raises:
        ValueError: the architecture is unknown, keys are missing (the message names all of them), or this decoder would not
            compute exactly what the file declares.
    """
    arch = architecture(file)
    try:
        return _read(file, arch, dtype)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def architecture(file: GGUFFile) -> str:
    """Return the architecture that the file names.

    Raises:
        ValueError: the architecture is not supported, or the file holds something other than a model.
    """
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{file.path} holds a GGUF of type {kind!r}, expected 'model'")
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(
            f"{file.path}: unsupported GGUF architecture {arch!r}, expected one of {', '.join(ARCHITECTURES)} "
            "(llama.cpp writes Mistral as llama)"
        )
    return arch


def _read(file: GGUFFile, arch: str, dtype: str | None) -> Architecture:
    required = {**_SIZES, _EPS: "rms_norm_eps"}
    absent = [f"{arch}.{key}" for key in required if f"{arch}.{key}" not in file.metadata]
    absent += [name for name in (EMBEDDING,) if name not in file.tensors]
    if absent:
        raise ValueError(f"the file lacks {', '.join(absent)}")
    _refuse_unsupported(file, arch)
    sizes = {field: _same(file, f"{arch}.{key}") for key, field in _SIZES.items()}
    if sizes["num_layers"] > len(file.tensors):  # a damaged file; a list of so many layers might not fit into memory
        layers = sizes["num_layers"]
        raise ValueError(f"{arch}.block_count is {layers}, but the file has only {len(file.tensors)} tensors")
    sizes["num_layers"] -= qwen3next.predicting(file, arch, sizes["num_layers"])
    heads = sizes["num_q_heads"]
    head_dim = _same(file, f"{arch}.attention.key_length", sizes["hidden_size"] // max(1, heads))
    _refuse_other_heads(file, arch, head_dim)
    theta = _decimal(file, f"{arch}.rope.freq_base", 10000.0)
    if dtype is None:
        dtype = "bfloat16" if file.tensors[EMBEDDING].kind.name == "BF16" else "float32"
    if arch not in _PLAIN:
        return _of_family(file, arch, sizes, head_dim, theta, dtype)
    scaling = None
    if ROPE_FACTORS in file.tensors:
        factors = file.read(ROPE_FACTORS, np.dtype(np.float64))
        scaling = scaling_from_factors(factors, head_dim, theta)
    return Architecture(
        **sizes,
        vocab_size=_vocab_size(file, arch),
        num_kv_heads=_same(file, f"{arch}.attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=_decimal(file, f"{arch}.{_EPS}"),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=OUTPUT not in file.tensors,
        qkv_bias=arch == "qwen2",
        qk_norm=arch == "qwen3",
        eos_token_ids=_end_ids(file),
        windows=_windows(file, arch, sizes["num_layers"], sizes["max_position_embeddings"]),
        dtype=dtype,
    )


def _of_family(
    file: GGUFFile, arch: str, sizes: dict[str, Any], head_dim: int, theta: float, dtype: str
) -> Architecture:
    """Read the configuration of a model whose parts `models.files.tables.families` has."""
    hf = {key: sizes[field] for key, field in SIZES.items() if field in sizes}
    hf |= {
        "vocab_size": _vocab_size(file, arch),
        "num_key_value_heads": _same(file, f"{arch}.attention.head_count_kv", sizes["num_q_heads"]),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(file, f"{arch}.{_EPS}"),
        "rope_theta": theta,
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "eos_token_id": list(_end_ids(file)),
    }
    config = Architecture(**hf_config.read(families.declared(file, arch, hf)) | {"dtype": dtype})
    families.check_factor(file, config)
    return config


def _same(file: GGUFFile, key: str, default: int | None = None) -> Any:
    """Return a size, which a file can also give as a list with one value for each layer."""
    value = file.metadata.get(key, default)
    values = value if isinstance(value, list) else [value]
    if {type(item) for item in values} != {int}:
        raise ValueError(f"{key} must be a whole number, got {value!r}")
    if len(set(values)) > 1:
        raise ValueError(f"unsupported {key} that differs between layers: {sorted(set(values))}")
    return values[0]


def _decimal(file: GGUFFile, key: str, default: float | None = None) -> float:
    """Return a float32 of the file as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    value = file.metadata.get(key, default)
    if not isinstance(value, float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return float(str(np.float32(value)))


def _refuse_unsupported(file: GGUFFile, arch: str) -> None:
    """Refuse settings that would change the arithmetic."""
    for key, neutral in _NEUTRAL.items():
        if key in families.keys_read(arch):
            continue
        value = file.metadata.get(f"{arch}.{key}")
        if value is not None and value not in neutral:
            expected = f", expected {' or '.join(map(str, neutral))}" if neutral else ""
            raise ValueError(f"unsupported {arch}.{key}={value!r}{expected}")


def _refuse_other_heads(file: GGUFFile, arch: str, head_dim: int) -> None:
    """Refuse value heads of another size than key heads, and rotations of only a part of a head."""
    for key in ("attention.value_length", *(("rope.dimension_count",) if arch not in _PARTIAL else ())):
        size = _same(file, f"{arch}.{key}", head_dim)
        if size != head_dim:
            raise ValueError(f"unsupported {arch}.{key}={size}, expected head_dim {head_dim}")


def _windows(file: GGUFFile, arch: str, layers: int, context: int) -> tuple[int, ...]:
    """Return the sliding window of every layer in tokens; () if no layer has a window narrower than the context."""
    window = _same(file, f"{arch}.attention.sliding_window", 0)
    if not 0 < window < context:
        return ()
    if arch != "llama":  # a Mistral, which has its window in every layer
        raise ValueError(
            f"unsupported sliding window of {window} tokens in a file of architecture {arch!r}, which does not say which "
            "layers have it: convert the model from its Hugging Face directory"
        )
    return (window,) * layers


def _vocab_size(file: GGUFFile, arch: str) -> int:
    """Return the rows of the embedding: the metadata's size, else the number of tokens, else the rows of the tensor."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    rows = file.tensors[EMBEDDING].shape[0] if tokens is None else len(tokens)
    return _same(file, f"{arch}.vocab_size", rows)


def _end_ids(file: GGUFFile) -> tuple[int, ...]:
    """List the ids of the tokens that end a text, without repeats, the metadata's ids first."""
    named = (file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    by_text = (tokens.index(text) for text in _END_OF_TURN if text in tokens)
    return tuple(dict.fromkeys(i for i in (*named, *by_text) if i is not None))
