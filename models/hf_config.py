"""Translation between Hugging Face's ``config.json`` and the fields of `models.config.ModelConfig`.

A setting that this decoder does not compute is an error here, so that a checkpoint never runs as a slightly different model.
"""

from __future__ import annotations

from typing import Any

from .config_checks import check_types, eos_ids

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "llama3")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SIZES = {  # key of the file -> our field
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_q_heads",
    "max_position_embeddings": "max_position_embeddings",
}
_MISTRAL_WINDOW = 4096  # default of transformers' class for Mistral files without this key; null means no window
_QWEN3_HEAD_DIM = 128  # default of transformers' class for Qwen3, whose heads are not hidden_size / heads


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """The fields of a ModelConfig, with ``rope_scaling`` as a plain dict or None.

    Args:
        hf: a ``config.json`` as a dict.

    Raises:
        ValueError: keys are missing, all of which the message names; a value is of another type than its key's; or a setting
            is not supported.
    """
    model_type = hf.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"unsupported model_type {model_type!r}, expected one of {', '.join(MODEL_TYPES)}")
    required = list(_SIZES) if model_type == "llama" else [*_SIZES, "num_key_value_heads"]
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
    theta, scaling = _rope(hf)
    return {
        **{field: hf[key] for key, field in _SIZES.items()},
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": hf.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings")),
        "qkv_bias": model_type == "qwen2",
        "qk_norm": model_type == "qwen3",
        "eos_token_ids": eos_ids(hf.get("eos_token_id")),
        "dtype": _dtype(hf),
    }


def _dtype(hf: dict[str, Any]) -> str:
    """The declared dtype, from its new or old key. float16 becomes float32, which alone holds it exactly."""
    declared = hf.get("dtype", hf.get("torch_dtype")) or "float32"
    return "float32" if declared == "float16" else declared


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
    window = _window(hf, model_type)
    if window is not None:
        raise ValueError(
            f"unsupported sliding window of {window} tokens for model_type {model_type!r} with "
            f"max_position_embeddings {hf['max_position_embeddings']}: every layer must attend in full"
        )


def _window(hf: dict[str, Any], model_type: str) -> int | None:
    """The size in tokens of a sliding window that some layer uses; None if no layer does."""
    if model_type == "llama":
        return None
    if model_type == "mistral":
        window = hf.get("sliding_window", _MISTRAL_WINDOW)
        slides = True
    else:
        window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
        layers = hf.get("layer_types")
        first = hf.get("max_window_layers", 0)  # layers below this number have no window
        slides = "sliding_attention" in layers if layers else first < hf["num_hidden_layers"]
    return window if window is not None and slides and window < hf["max_position_embeddings"] else None


def _rope(hf: dict[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """The RoPE base, and the four numbers of llama3 or None, from the old or the new keys."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = rope.get("rope_theta", hf.get("rope_theta", 10000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_TYPES or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"unsupported rope scaling {rope!r}, expected rope_type one of {', '.join(ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"unsupported partial_rotary_factor {partial!r}, expected 1.0")
    if kind == "default":
        return theta, None
    absent = [key for key in _LLAMA3_KEYS if key not in rope]
    if absent:
        raise ValueError(f"rope scaling of type 'llama3' lacks {', '.join(absent)}, got {rope!r}")
    return theta, {key: rope[key] for key in _LLAMA3_KEYS}


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """The dict for ``config.json`` from the fields of a ModelConfig.

    It has the old and the new RoPE keys, so that old and new readers agree. A model without switches is written as Llama, or
    as Mistral if its hidden size is no multiple of its heads, because Llama's class would refuse it.

    Raises:
        ValueError: q/k norm and QKV bias are both on, which no supported family has.
    """
    if fields["qk_norm"] and fields["qkv_bias"]:
        raise ValueError("no Hugging Face family has both qk_norm and qkv_bias, got both True")
    if fields["qk_norm"]:
        model_type = "qwen3"
    elif fields["qkv_bias"]:
        model_type = "qwen2"
    else:
        model_type = "mistral" if fields["hidden_size"] % fields["num_q_heads"] else "llama"
    rope = {"rope_type": "default"}
    if fields["rope_scaling"] is not None:
        rope = {"rope_type": "llama3", **fields["rope_scaling"]}
    eos = list(fields["eos_token_ids"])
    hf = {
        "architectures": [{"qwen3": "Qwen3", "qwen2": "Qwen2"}.get(model_type, model_type.title()) + "ForCausalLM"],
        "model_type": model_type,
        **{key: fields[field] for key, field in _SIZES.items()},
        "num_key_value_heads": fields["num_kv_heads"],
        "head_dim": fields["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": fields["rms_norm_eps"],
        "rope_theta": fields["rope_theta"],
        "rope_scaling": None if fields["rope_scaling"] is None else rope,
        "rope_parameters": {**rope, "rope_theta": fields["rope_theta"]},
        "tie_word_embeddings": fields["tie_word_embeddings"],
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "torch_dtype": fields["dtype"],
    }
    if model_type == "qwen3":
        hf["attention_bias"] = False
    if model_type == "mistral":
        hf["sliding_window"] = None
    return hf
