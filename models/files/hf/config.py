"""Translation between Hugging Face's ``config.json`` and the fields of `models.sizes.architecture.Architecture`.

A setting that this decoder does not compute is an error here, so that a checkpoint never runs as a slightly different model.
"""

from typing import Any

from ...sizes.architecture import Architecture
from ..tables.families import ALL, FAMILIES, MISSING
from . import families as hf_families
from . import latent as hf_latent
from .checks import check_names, eos_ids

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
        hf = _of_text(hf, hf["text_config"])
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in MISSING:
        raise ValueError(f"unsupported model_type {model_type!r}: this decoder does not have {MISSING[model_type]}")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"unsupported model_type {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")
    check_names(hf)
    return (hf_latent if ALL[model_type].latent else hf_families).read(hf)


def _of_text(whole: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """Take the text model out of a file of Gemma 3 with images, which may say a thing in both places."""
    outer = {key: whole[key] for key in _OUTER if whole.get(key) is not None}
    ends = dict.fromkeys((*eos_ids(outer.pop("eos_token_id", None)), *eos_ids(text.get("eos_token_id"))))
    if differ := [key for key, value in outer.items() if text.get(key, value) not in (value, None)]:
        told = ", ".join(f"{key}={text[key]!r:.60} and {outer[key]!r:.60}" for key in differ)
        raise ValueError(f"text_config and the file around it differ: got {told}, expected one value")
    return {**_GEMMA3_TEXT, **text, **outer, "eos_token_id": list(ends), "model_type": "gemma3_text"}


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
