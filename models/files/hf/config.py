"""Translation between Hugging Face's ``config.json`` and the fields of `models.sizes.architecture.Architecture`.

A setting that this decoder does not compute is an error here, so that a checkpoint never runs as a slightly different model.
"""

from __future__ import annotations

from typing import Any

from ...sizes.architecture import Architecture
from ..tables.families import FAMILIES, MISSING
from . import experts
from . import families as hf_families
from . import latent as hf_latent
from . import rope as hf_rope
from . import windows as hf_windows
from .checks import check_types, eos_ids
from .families import SIZES, declared_dtype

_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe",
            "mixtral": "Mixtral"}  # names of transformers' classes  # fmt: skip
MODEL_TYPES = (*_CLASSES, *FAMILIES)
# Parts that only families have -> their values in all other models.
_OF_FAMILIES = {"wide_qk_norm": False, "ropes": (), "norm": "rms", "norm_place": "before", "activation": "silu",
                "query_scale": None, "embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_multiplier": 1.0,
                "logit_softcap": None, "output_gate": False, "linear": None, "attention_softcap": None,
                "attention_sinks": False, "out_bias": False, "mlp_gate": True, "latent": None}  # fmt: skip
_QWEN3_HEAD_DIM = 128  # default of transformers' class for Qwen3, whose heads are not hidden_size / heads


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """Translate a ``config.json`` to the fields of an Architecture, with ``rope_scaling`` as a `RopeRule` or None.

    Args:
        hf: a ``config.json`` as a dict.

    Raises:
        ValueError: keys are missing (the message names all of them), a value has the wrong type, or a setting is not
            supported.
    """
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and model_type in FAMILIES:
        return (hf_latent if FAMILIES[model_type].latent else hf_families).read(hf)
    if isinstance(model_type, str) and model_type in MISSING:
        raise ValueError(f"unsupported model_type {model_type!r}: this decoder does not have {MISSING[model_type]}")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"unsupported model_type {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")
    required = list(SIZES) if model_type == "llama" else [*SIZES, "num_key_value_heads"]
    absent = [key for key in required if key not in hf]
    if absent:
        raise ValueError(f"config.json of model_type {model_type!r} lacks {', '.join(absent)}")
    check_types(hf)
    _refuse_unsupported(hf, model_type)
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim")
    if head_dim is None:
        head_dim = _QWEN3_HEAD_DIM if model_type == "qwen3" else hf["hidden_size"] // heads
    kv_heads = hf.get("num_key_value_heads")
    positions = hf["max_position_embeddings"]
    theta, rule = hf_rope.read(hf, default_theta=1e6 if model_type == "mixtral" else 1e4)
    context = positions if rule is None else rule.context(positions)
    return {
        **{field: hf[key] for key, field in SIZES.items()},
        "max_position_embeddings": context,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6),
        "rope_theta": theta,
        "rope_scaling": rule,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings")),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type in ("qwen3", "qwen3_moe"),
        "experts": experts.read(hf),
        "eos_token_ids": eos_ids(hf.get("eos_token_id")),
        "windows": hf_windows.read(hf, context),
        "dtype": declared_dtype(hf),
    }


def check_family(family: str) -> None:
    """Refuse a ``family`` that `FAMILIES` lacks.

    Raises:
        ValueError: the message lists the families.
    """
    if family not in ("", *FAMILIES):
        raise ValueError(f"ModelConfig: family must be '' or one of {', '.join(FAMILIES)}, got {family!r}")


def _refuse_unsupported(hf: dict[str, Any], model_type: str) -> None:
    """Refuse settings that would change the arithmetic."""
    act = hf.get("hidden_act", "silu")
    if act != "silu":
        raise ValueError(f"unsupported hidden_act {act!r}, expected 'silu'")
    # In transformers' classes attention_bias adds a bias to the output projection too, which this decoder does not have.
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            raise ValueError(f"unsupported {key}={hf[key]!r} for model_type {model_type!r}, expected false")
    if hf.get("quantization_config"):
        raise ValueError("unsupported quantization_config: expected plain float weights")


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields of an Architecture to a dict for ``config.json``.

    The dict has the old and the new RoPE keys, so that old and new readers agree. A model without switches is written as
    Llama. It is written as Mistral if it has windows, or if its hidden size is no multiple of its heads, which Llama's class
    refuses.

    Raises:
        ValueError: no supported family has the switches (q/k norm and QKV bias both on) or the windows.
    """
    if family := fields["family"]:
        hf = (hf_latent if FAMILIES[family].latent else hf_families).write(fields)
        if (described := Architecture(**fields)) != Architecture(**read(hf)):
            raise ValueError(f"no config.json of model_type {family!r} has all parts of this model: {described}")
        return hf
    own = [name for name, default in _OF_FAMILIES.items() if fields[name] != default]
    if own:
        raise ValueError(f"a model with {own[0]}={fields[own[0]]!r:.60} needs the family of its files, got family=''")
    if fields["qk_norm"] and fields["qkv_bias"]:
        raise ValueError("no Hugging Face family has both qk_norm and qkv_bias, got both True")
    if fields["qk_norm"]:
        model_type = "qwen3"
    elif fields["qkv_bias"]:
        model_type = "qwen2"
    else:
        model_type = "mistral" if fields["hidden_size"] % fields["num_q_heads"] else "llama"
    model_type, of_experts = experts.write(fields, model_type)
    model_type, windows = hf_windows.write(fields["windows"], model_type)
    rule = fields["rope_scaling"]
    rope = hf_rope.write(rule)
    eos = list(fields["eos_token_ids"])
    hf = {
        "architectures": [_CLASSES[model_type] + "ForCausalLM"],
        "model_type": model_type,
        **{key: fields[field] for key, field in SIZES.items()},
        "num_key_value_heads": fields["num_kv_heads"],
        "head_dim": fields["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": fields["rms_norm_eps"],
        "rope_theta": fields["rope_theta"],
        "rope_scaling": None if rule is None else rope,
        "rope_parameters": {**rope, "rope_theta": fields["rope_theta"]},
        "tie_word_embeddings": fields["tie_word_embeddings"],
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "torch_dtype": fields["dtype"],
        **of_experts,
    }
    if rule is not None and rule.rope_type == "dynamic":
        # The file's value says where stretching begins, not where the context ends.
        hf["max_position_embeddings"] = rule.original_max_position_embeddings
    if model_type == "qwen3":
        hf["attention_bias"] = False
    return {**hf, **windows}
