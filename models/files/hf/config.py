"""Translation between Hugging Face's ``config.json`` and the fields of `models.sizes.architecture.Architecture`.

A setting that this decoder does not compute is an error here, so that a checkpoint never runs as a slightly different model.
"""

from __future__ import annotations

from typing import Any

from ...sizes.architecture import Architecture
from ..tables.families import ALL, FAMILIES, MISSING
from . import families as hf_families
from . import latent as hf_latent

MODEL_TYPES = tuple(ALL)
# Gemma 3 from 4B on: what transformers takes where ``text_config`` is silent, and keys that stand outside of it.
_GEMMA3_TEXT = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 131072,
}  # fmt: skip
_OUTER = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """Translate a ``config.json`` to the fields of an Architecture; of Gemma 3 with images, its text model."""
    if hf.get("model_type") == "gemma3" and isinstance(hf.get("text_config"), dict):
        hf = {
            **_GEMMA3_TEXT,
            **{key: hf[key] for key in _OUTER if key in hf},
            **hf["text_config"],
            "model_type": "gemma3_text",
        }
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in MISSING:
        raise ValueError(f"unsupported model_type {model_type!r}: this decoder does not have {MISSING[model_type]}")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"unsupported model_type {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")
    return (hf_latent if ALL[model_type].latent else hf_families).read(hf)


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields of an Architecture to a dict for ``config.json``."""
    kind = fields["family"] or _inferred(fields)
    hf = (hf_latent if ALL[kind].latent else hf_families).write({**fields, "family": kind})
    try:
        again = vars(Architecture(**read(hf)))
    except ValueError as error:
        raise ValueError(f"no config.json of model_type {kind!r} has all parts of this model: {error}") from error
    others = [f"{name}={value!r:.80}" for name, value in fields.items() if again[name] != value]
    if others:
        raise ValueError(f"no config.json of model_type {kind!r} has {', '.join(others)}")
    return hf


def _inferred(fields: dict[str, Any]) -> str:
    """Find the model type of a model without a family by its parts.

    A model without any is Llama. It is Mistral if it has windows, or if its hidden size is no multiple of its heads, which
    Llama's class refuses.
    """
    if fields["experts"] is not None:
        return "qwen3_moe" if fields["qk_norm"] else "mixtral"
    if fields["qk_norm"] or fields["qkv_bias"]:
        return "qwen3" if fields["qk_norm"] else "qwen2"
    return "mistral" if any(fields["windows"]) or fields["hidden_size"] % fields["num_q_heads"] else "llama"


def check_family(family: str) -> None:
    """Refuse a ``family`` that `FAMILIES` lacks."""
    if family not in ("", *FAMILIES):
        raise ValueError(f"ModelConfig: family must be '' or one of {', '.join(FAMILIES)}, got {family!r}")
