"""Translation between ``config.json`` and an `Architecture`, for the families in `models.files.tables.families`."""

import math
from typing import Any

from ...sizes.linear import LinearLayers
from ...sizes.parts import ACTIVATIONS, LayerRope
from ..tables.families import ALL, INFERRED, Family
from . import experts
from . import rope as hf_rope
from .checks import check_types, eos_ids

SIZES = {  # key of the file -> our field
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_q_heads",
    "max_position_embeddings": "max_position_embeddings",
}
_LARGEST = 1e32  # of numbers that scale; its square root and its inverse are floats
_LIMITS = {  # a layer has entries in tuples
    **dict.fromkeys((*SIZES, "head_dim", "rotary_dim"), 1 << 31), "num_hidden_layers": 1 << 16,
}  # fmt: skip
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_OF_LINEAR = {  # key of the file -> field of `LinearLayers`
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv_width",
}
# Switches of a file for parts that no family here has -> what they would need.
_REFUSED = {
    "attn_logit_softcapping": "a soft cap on the logits of attention",
    "use_bidirectional_attention": "attention to later tokens",
    "use_qk_norm": "LayerNorm of each query and key head",
    "mlp_bias": "a bias in the MLP",
    "attention_out_bias": "a bias on the output of attention",
    "index_topk": "the indexer that chooses the tokens of sparse attention",
}
_MXFP4 = "mxfp4"  # experts in 4 bits, which are decoded when they are read


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """Translate a ``config.json``; see `models.files.hf.config.read`."""
    model_type = hf["model_type"]
    family = ALL[model_type]
    unstated = {"rope_scaling": None} if hf.get("rope_parameters") else {}  # two names of one thing
    hf = {**family.defaults, **unstated, **hf}
    absent = [key for key in (*SIZES, *family.required) if key not in hf]
    if absent:
        raise ValueError(f"config.json of model_type {model_type!r} lacks {', '.join(absent)}")
    check_types(hf)
    _refuse(hf, family)
    for key, limit in _LIMITS.items():
        if (hf.get(key) or 0) >= limit:
            raise ValueError(f"{key} must be below {limit}, got {hf[key]!r:.60}")
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    if "rotary_dim" in family.defaults and hf["rotary_dim"] is not None:
        hf.setdefault("partial_rotary_factor", hf["rotary_dim"] / head_dim)
    window = _window(hf, family)
    slides = _slides(hf, family, window)
    layers = _ropes(hf, family, slides, window, head_dim)
    plain = next((rope for rope, slid in zip(layers, slides, strict=True) if rope.rotated != 0 and not slid), None)
    plain = plain or next((rope for rope in layers if rope.rotated != 0), LayerRope(theta=1e4))
    context = hf["max_position_embeddings"]
    if plain.scaling is not None:
        context = plain.scaling.context(context)
    same = all(rope == plain for rope in layers) and plain.rotated is None
    windows = tuple(window if slid else None for slid in slides)
    whole = family.windows == "all" or model_type in INFERRED  # such a file has a window that no text fills
    if not any(slides) or (whole and window is not None and window >= context):
        windows = ()
    kv_heads = hf.get("num_key_value_heads")
    return {
        **{field: hf[key] for key, field in SIZES.items()},
        "max_position_embeddings": context,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": hf["layer_norm_eps"] if family.parts.get("norm") == "layer" else hf.get("rms_norm_eps", 1e-6),
        "rope_theta": plain.theta,
        "rope_scaling": plain.scaling,
        "ropes": () if same else layers,
        "tie_word_embeddings": bool(hf.get("tie_word_embeddings")),
        "qkv_bias": bool(hf.get(family.qkv_bias_key)),
        "out_bias": bool(hf.get(family.out_bias_key)),
        "eos_token_ids": eos_ids(hf.get("eos_token_id")),
        "windows": windows,
        "dtype": declared_dtype(hf),
        "activation": hf.get("hidden_activation") or hf.get("hidden_act", "silu"),
        "family": "" if model_type in INFERRED else model_type,
        "linear": _read_linear(hf) if family.linear else None,
        "experts": None if family.latent else experts.read(hf, family),  # `models.files.hf.latent` reads the others'
        **({"qk_norm": bool(hf.get("use_qk_norm"))} if family.qk_norm_key else {}),
        **family.parts,
        **_numbers(hf, family, head_dim),
    }


def _read_linear(hf: dict[str, Any]) -> LinearLayers | None:
    """Read the layers of linear attention that ``config.json`` declares; None if every layer has attention."""
    count, named = hf["num_hidden_layers"], hf.get("layer_types")
    if named is None:
        every = hf["full_attention_interval"]
        named = [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(count)]
    other = [name for name in named if name not in (_FULL, _LINEAR)]
    if len(named) != count or other:
        raise ValueError(f"layer_types must name {_FULL!r} or {_LINEAR!r} for each of {count} layers, got {named!r:.80}")
    layers = tuple(layer for layer, name in enumerate(named) if name == _LINEAR)
    return LinearLayers(layers=layers, **{field: hf[key] for key, field in _OF_LINEAR.items()}) if layers else None


def _write_linear(linear: LinearLayers | None, count: int) -> dict[str, Any]:
    """Return the keys of ``config.json`` for a model of ``count`` layers; `_read_linear` reads them."""
    if linear is None:
        return {"layer_types": [_FULL] * count}
    named = [_LINEAR if layer in linear.layers else _FULL for layer in range(count)]
    return {"layer_types": named, **{key: vars(linear)[field] for key, field in _OF_LINEAR.items()}}


def declared_dtype(hf: dict[str, Any]) -> str:
    """Return the declared dtype, from its new or old key. float16 becomes float32, the only dtype that holds it exactly."""
    declared = hf.get("dtype", hf.get("torch_dtype")) or "float32"
    return "float32" if declared == "float16" else declared


def _refuse(hf: dict[str, Any], family: Family) -> None:
    """Refuse settings of parts that this decoder does not have."""
    kind = hf["model_type"]
    for key, part in _REFUSED.items():
        if key in family.numbers or key in family.fixed or key == family.out_bias_key:
            continue
        if key == "use_qk_norm" and family.qk_norm_key:
            continue
        if hf.get(key):
            raise ValueError(f"unsupported {key}={hf[key]!r:.60} for model_type {kind!r}: this decoder does not have {part}")
    if hf.get("quantization_config") and not _is_mxfp4(hf, family):
        way = hf["quantization_config"].get("quant_method")
        raise ValueError(
            f"unsupported quantization_config of quant_method={way!r:.60}: take its weights before quantisation, or a "
            "GGUF file; weight_dtype='int8' or 'int4' quantises weights when they are loaded"
        )
    for key, value in family.fixed.items():
        actual = hf.get(key)
        each = actual if isinstance(actual, list) else [actual]  # some keys have an entry for each layer
        if any(entry is not None and entry != value for entry in each):
            raise ValueError(f"unsupported {key}={actual!r:.60} for model_type {kind!r}, expected {value!r}")
    if hf.get("attention_bias") and family.qkv_bias_key != "attention_bias":
        raise ValueError(
            f"unsupported attention_bias={hf['attention_bias']!r} for model_type {kind!r}: this decoder does not have a bias "
            "on the output of attention"
        )
    act = hf.get("hidden_activation") or hf.get("hidden_act", "silu")
    if act not in ACTIVATIONS:
        raise ValueError(f"unsupported activation {act!r} for model_type {kind!r}, expected one of {', '.join(ACTIVATIONS)}")


def _is_mxfp4(hf: dict[str, Any], family: Family) -> bool:
    """Tell whether the weights are quantised in the one way that is read (`models.files.four_bits`)."""
    quantisation = hf.get("quantization_config") or {}
    return family.expert_files is not None and family.expert_files.clamped and quantisation.get("quant_method") == _MXFP4


def _numbers(hf: dict[str, Any], family: Family, head_dim: int) -> dict[str, Any]:
    """Read the numbers that scale what a layer or the model computes."""
    numbers: dict[str, Any] = {}
    for key, field in family.numbers.items():
        value = hf.get(key)
        if value is not None and not 0 < value <= _LARGEST:
            raise ValueError(f"{key} must be a positive number of at most {_LARGEST:g}, got {value!r:.60}")
        if value is not None:
            inverse = {"query_pre_attn_scalar": -0.5, "logits_scaling": -1}.get(key)
            value = float(value if inverse is None else value**inverse)
        numbers[field] = value
    if numbers.get("query_scale") == head_dim**-0.5:
        numbers["query_scale"] = None
    if "query_pre_attn_scalar" in family.numbers:
        numbers["embedding_multiplier"] = math.sqrt(hf["hidden_size"])
    return numbers


def _window(hf: dict[str, Any], family: Family) -> int | None:
    if family.windows == "none" or ("use_sliding_window" in family.defaults and not hf["use_sliding_window"]):
        return None
    window = hf.get("sliding_window")
    if window is not None and window < 1:
        raise ValueError(f"sliding_window must be a whole number of at least 1 token or null, got {window!r}")
    return window


def _slides(hf: dict[str, Any], family: Family, window: int | None) -> tuple[bool, ...]:
    """Tell for each layer whether it has a window."""
    count, named = hf["num_hidden_layers"], hf.get("layer_types")
    switched_off = hf["model_type"] in INFERRED and not hf.get("use_sliding_window", True)
    if switched_off and family.windows == "some" and _SLIDING in (named or ()):
        raise ValueError(f"use_sliding_window=false and {_SLIDING!r} in layer_types differ: expected one of the two")
    if switched_off or (window is None and family.optional_window and _SLIDING not in (named or ())):
        return (False,) * count
    if family.windows != "some":
        if hf["model_type"] in INFERRED and window is not None and {*(named or [_SLIDING])} != {_SLIDING}:
            raise ValueError(f"unsupported layer_types {named!r:.80}, expected {_SLIDING!r} in every layer")
        return (window is not None,) * count
    if window is None:
        raise ValueError("sliding_window must be a whole number of tokens where layers have a window, got null")
    if named is not None:
        other = [name for name in named if name not in (_FULL, _SLIDING)]
        if len(named) != count or other:
            raise ValueError(f"layer_types must name {_FULL!r} or {_SLIDING!r} for each of {count} layers, got {named!r:.80}")
        return tuple(name == _SLIDING for name in named)
    if family.rotates == "listed":
        return tuple(not rotates for rotates in _listed(hf))
    if "max_window_layers" in hf:
        return tuple(layer >= hf["max_window_layers"] for layer in range(count))
    pattern = hf.get("sliding_window_pattern")
    if type(pattern) is not int or pattern < 1:
        raise ValueError(
            f"model_type {hf['model_type']!r} needs layer_types, or a positive whole number in sliding_window_pattern, "
            f"got {pattern!r}"
        )
    return tuple((layer + 1) % pattern != 0 for layer in range(count))


def _listed(hf: dict[str, Any]) -> tuple[bool, ...]:
    """Tell for each layer whether it rotates, from a list or an interval."""
    count, listed = hf["num_hidden_layers"], hf.get("no_rope_layers")
    if listed is None:
        return tuple((layer + 1) % hf["no_rope_layer_interval"] != 0 for layer in range(count))
    if not isinstance(listed, list) or len(listed) < count or any(item not in (0, 1) for item in listed):
        raise ValueError(f"no_rope_layers must be a list of 0 or 1 for each of {count} layers, got {listed!r:.80}")
    return tuple(bool(item) for item in listed[:count])


def _ropes(
    hf: dict[str, Any], family: Family, slides: tuple[bool, ...], window: int | None, head_dim: int
) -> tuple[LayerRope, ...]:
    """Read the rotation of each layer."""
    declared = hf_rope.declared(hf)
    nested = any(isinstance(value, dict) for value in declared.values())
    if family.two_ropes:
        objects = all(isinstance(declared.get(name) or {}, dict) for name in (_FULL, _SLIDING))
        if hf.get("rope_parameters") and not (nested and objects):
            raise ValueError(f"rope_parameters must have an object for {_FULL} and for {_SLIDING}, got {declared!r:.80}")
        full, near = (declared.get(_FULL) or {}, declared.get(_SLIDING) or {}) if nested else (declared, {})
        theta = hf.get("rope_local_base_freq", hf.get("rope_theta", 1e4))
        of_full, of_near = (_rope(hf, full, hf.get("rope_theta", 1e4), head_dim), _rope(hf, near, theta, head_dim))
        return tuple(of_near if slid else of_full for slid in slides)
    if nested:
        raise ValueError(
            f"unsupported rope_parameters of model_type {hf['model_type']!r}, expected one object, got {declared!r:.80}"
        )
    rope = _rope(hf, declared, hf.get("rope_theta", 1e4), head_dim)
    rotates = (True,) * len(slides)
    if family.rotates == "listed":
        rotates = _listed(hf)
    elif family.rotates == "windows" and window is not None:
        rotates = slides
    return tuple(rope if each else LayerRope(theta=rope.theta, rotated=0) for each in rotates)


def _rope(hf: dict[str, Any], declared: dict[str, Any], theta: float, head_dim: int) -> LayerRope:
    """Read one rotation, an object of ``config.json``."""
    share = declared.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if share != 1 and not ALL[hf["model_type"]].partial:
        raise ValueError(f"unsupported partial_rotary_factor {share!r} for model_type {hf['model_type']!r}, expected 1.0")
    rotated = int(head_dim * share)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ValueError(
            f"unsupported partial_rotary_factor {share!r}, expected an even number of at most {head_dim} channels, "
            f"got {rotated}"
        )
    width = hf.get("rotary_dim") if "rotary_dim" in ALL[hf["model_type"]].defaults else None
    if width not in (None, rotated):
        raise ValueError(
            f"rotary_dim={width!r} and partial_rotary_factor={share!r} of {head_dim} channels differ, expected one"
        )
    # The sections of several positions of a token are the same channels in any order where a text has one position.
    rest = {key: value for key, value in declared.items() if key != "partial_rotary_factor" and not key.startswith("mrope_")}
    if hf["model_type"] == "phi3" and rest.get("rope_type") in ("su", "yarn"):  # its old names of longrope
        rest["rope_type"] = "longrope"
    file = {"rope_parameters": {"rope_theta": theta, **rest}, "max_position_embeddings": hf["max_position_embeddings"]}
    if "original_max_position_embeddings" in hf:
        file["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    base, rule = hf_rope.read(file)
    return LayerRope(theta=base, scaling=rule, rotated=None if rotated == head_dim else rotated)


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields of an Architecture with a ``family``; see `models.files.hf.config.write`."""
    model_type, head_dim, count = fields["family"], fields["head_dim"], fields["num_layers"]
    family = ALL[model_type]
    windows = fields["windows"] or (None,) * count
    ropes = fields["ropes"] or (LayerRope(theta=fields["rope_theta"], scaling=fields["rope_scaling"]),) * count
    eos = list(fields["eos_token_ids"])
    layered = family.parts.get("norm") == "layer"
    hf: dict[str, Any] = {
        "architectures": [family.class_name + "ForCausalLM"],
        "model_type": model_type,
        **{key: fields[field] for key, field in SIZES.items()},
        "num_key_value_heads": fields["num_kv_heads"],
        "head_dim": head_dim,
        "hidden_activation" if "hidden_activation" in family.defaults else "hidden_act": fields["activation"],
        "layer_norm_eps" if layered else "rms_norm_eps": fields["rms_norm_eps"],
        "tie_word_embeddings": fields["tie_word_embeddings"],
        **({family.qkv_bias_key: fields["qkv_bias"]} if family.qkv_bias_key else {"attention_bias": False}),
        **({family.out_bias_key: fields["out_bias"]} if family.out_bias_key else {}),
        **({} if family.experts else experts.write_stacked(fields["experts"])),
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "pad_token_id": None,  # the default of some classes lies outside of a small vocabulary
        "torch_dtype": fields["dtype"],
    }
    for key, field in family.numbers.items():
        value = fields[field]
        if field == "query_scale" and value is None:
            value = head_dim**-0.5
        if key == "query_pre_attn_scalar":
            value = round(value**-2)
        hf[key] = 1 / value if key == "logits_scaling" else value
    if family.windows != "none":
        sizes = {window for window in windows if window is not None}
        # Where only layers with a window rotate, a model without either has a window that no layer uses.
        unused = fields["max_position_embeddings"] if family.rotates == "windows" and fields["ropes"] else None
        hf["sliding_window"] = max(sizes, default=unused)
    if family.windows == "some":
        hf["layer_types"] = [_FULL if window is None else _SLIDING for window in windows]
    if "max_window_layers" in family.defaults:  # its readers see the same model if the layers with a window are the last
        hf["max_window_layers"] = sum(window is None for window in windows)
    if "use_sliding_window" in family.defaults:
        hf["use_sliding_window"] = bool(fields["windows"])
    if family.linear:
        hf |= _write_linear(fields["linear"], count)
    if family.qk_norm_key:
        hf["use_qk_norm"] = fields["qk_norm"]
    if family.router and not family.latent and not family.mixtral_experts:
        hf |= experts.write_routed(fields)
    if family.experts:
        hf |= experts.family_keys(fields["experts"], count, model_type)
    hf["rope_parameters"] = _written_ropes(family, windows, ropes, head_dim)
    if family.rotates == "listed":
        hf["no_rope_layers"] = [int(rope.rotated != 0) for rope in ropes]
    scaling = fields["rope_scaling"]
    if model_type in INFERRED:  # older readers know these families, and the old keys of RoPE
        hf |= {"rope_theta": fields["rope_theta"], "rope_scaling": None if scaling is None else hf_rope.write(scaling)}
    if scaling is not None and scaling.rope_type == "dynamic":
        hf["max_position_embeddings"] = scaling.original_max_position_embeddings
    elif scaling is not None and "original_max_position_embeddings" in family.defaults:
        hf["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    return hf


def _written_ropes(
    family: Family, windows: tuple[int | None, ...], ropes: tuple[LayerRope, ...], head_dim: int
) -> dict[str, Any]:
    """Return ``rope_parameters``: one object, or an object for each kind of layer."""

    def one(rope: LayerRope) -> dict[str, Any]:
        keys = {**hf_rope.write(rope.scaling), "rope_theta": rope.theta}
        share = {} if rope.rotated is None else {"partial_rotary_factor": rope.rotated / head_dim}
        return {**keys, **share}

    if not family.two_ropes:
        keys = one(next((rope for rope in ropes if rope.rotated != 0), ropes[0]))
        whole = "partial_rotary_factor" in family.defaults and "partial_rotary_factor" not in keys
        return {**keys, "partial_rotary_factor": 1.0} if whole else keys
    kinds: dict[str, LayerRope | None] = {_FULL: None, _SLIDING: None}
    for window, rope in zip(windows, ropes, strict=True):
        kinds[_FULL if window is None else _SLIDING] = rope
    return {kind: one(rope or ropes[0]) for kind, rope in kinds.items()}
