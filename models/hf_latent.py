"""Translation between ``config.json`` of the families with latent attention and the fields of `models.config.ModelConfig`."""

from __future__ import annotations

from typing import Any

from . import hf_families
from .experts import Experts
from .families import FAMILIES
from .latent import Latent, query_scale
from .parts import LayerRope
from .router import Router

_OF_LATENT = {  # key of the file -> field of `Latent`
    "kv_lora_rank": "rank",
    "qk_rope_head_dim": "rotated",
    "qk_nope_head_dim": "key_dim",
    "v_head_dim": "value_dim",
    "q_lora_rank": "query_rank",
}
_OF_EXPERTS = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
               "moe_intermediate_size": "intermediate_size"}  # key of the file -> field of `Experts`  # fmt: skip
_V3 = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "rope_interleave": True,
}  # fmt: skip
_DEFAULTS = {  # keys that a file may lack -> value in transformers' class
    "deepseek_v2": {
        **_V3, "n_routed_experts": 64, "num_experts_per_tok": None, "moe_intermediate_size": 1407, "n_shared_experts": 2,
        "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "first_k_dense_replace": 0,
        "norm_topk_prob": False, "topk_method": "greedy",
    },
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
    "glm4_moe_lite": {
        **_V3, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_routed_experts": 64,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1,
    },
}  # fmt: skip
_DENSE, _SPARSE = "dense", "sparse"


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """Translate a ``config.json`` whose family has `models.families.Family.latent`; see `models.hf_config.read`."""
    kind = hf["model_type"]
    hf = {**_DEFAULTS[kind], **hf}
    _check_types(hf)
    latent = Latent(
        **{field: hf[key] for key, field in _OF_LATENT.items()},
        interleaved=kind == "deepseek_v2" or hf["rope_interleave"],
    )
    # The rest of the file is read as that of a model whose heads are the channels that rotate.
    fields = hf_families.read({**hf, "head_dim": latent.rotated, "num_key_value_heads": 1})
    rope = LayerRope(theta=fields["rope_theta"], scaling=fields["rope_scaling"], rotated=latent.rotated)
    return {
        **fields,
        "head_dim": latent.width,
        "ropes": (rope,) * fields["num_layers"],
        "query_scale": query_scale(latent, fields["rope_scaling"]),
        "latent": latent,
        "experts": _experts(hf),
    }


def _check_types(hf: dict[str, Any]) -> None:
    """Refuse values of the wrong type, and settings of parts that this decoder does not have."""
    kind = hf["model_type"]
    for key in ("n_group", "topk_group"):
        if hf[key] is not None and (type(hf[key]) is not int or hf[key] < 1):
            raise ValueError(f"{key} must be a positive whole number or null, got {hf[key]!r:.60}")
    least = {"n_shared_experts": 0, "first_k_dense_replace": 0, **dict.fromkeys(_OF_EXPERTS, 1)}
    for key, smallest in least.items():
        if type(hf[key]) is not int or not smallest <= hf[key] < 2**31:
            raise ValueError(f"{key} must be a whole number of at least {smallest}, got {hf[key]!r:.60}")
    for key in ("norm_topk_prob", "rope_interleave"):
        if type(hf[key]) is not bool:
            raise ValueError(f"{key} must be true or false, got {hf[key]!r:.60}")
    score = FAMILIES[kind].latent
    v2 = score == "softmax"
    known = {
        "hidden_act": ("silu",),
        "scoring_func": (score,),
        "topk_method": ("greedy", "group_limited_greedy") if v2 else ("noaux_tc",),
        "moe_layer_freq": (1,),
        "ep_size": (1,),
        **({"norm_topk_prob": (False,)} if v2 else {}),
    }
    for key, values in known.items():
        if hf.get(key) is not None and hf[key] not in values:
            expected = " or ".join(map(repr, values))
            raise ValueError(f"unsupported {key}={hf[key]!r:.60} for model_type {kind!r}, expected {expected}")


def _experts(hf: dict[str, Any]) -> Experts | None:
    """Read the experts; None if no layer has experts."""
    layers = _mixed_layers(hf)
    if not layers:
        return None
    score = FAMILIES[hf["model_type"]].latent
    grouped = score == "sigmoid" or hf["topk_method"] == "group_limited_greedy"
    return Experts(
        **{field: hf[key] for key, field in _OF_EXPERTS.items()},
        norm_topk_prob=hf["norm_topk_prob"],
        layers=layers,
        router=Router(
            score=score,
            groups=(hf["n_group"] or 1) if grouped else 1,
            groups_per_tok=(hf["topk_group"] or 1) if grouped else 1,
            multiplier=hf["routed_scaling_factor"],
        ),
        shared_size=hf["n_shared_experts"] * hf["moe_intermediate_size"],
    )


def _mixed_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    """List the layers with experts."""
    count, named = hf["num_hidden_layers"], hf.get("mlp_layer_types")
    if named is None or hf["model_type"] != "glm4_moe_lite":
        return tuple(range(min(hf["first_k_dense_replace"], count), count))
    if not isinstance(named, list) or len(named) != count or any(name not in (_DENSE, _SPARSE) for name in named):
        raise ValueError(
            f"mlp_layer_types must name {_DENSE!r} or {_SPARSE!r} for each of {count} layers, got {named!r:.80}"
        )
    return tuple(layer for layer, name in enumerate(named) if name == _SPARSE)


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields of a ModelConfig with a latent to a dict for ``config.json``; see `models.hf_config.write`.

    Raises:
        ValueError: the model has no latent.
    """
    kind, latent, count = fields["family"], fields["latent"], fields["num_layers"]
    if latent is None:
        raise ValueError(f"a model of model_type {kind!r} needs a latent, got None")
    plain = {**fields, "ropes": (), "head_dim": latent.rotated, "num_kv_heads": fields["num_q_heads"]}
    hf = {
        **hf_families.write(plain),
        **{key: vars(latent)[field] for key, field in _OF_LATENT.items()},
        "rope_interleave": latent.interleaved,
        "first_k_dense_replace": count,
        "n_shared_experts": 0,
        "num_nextn_predict_layers": 0,
    }
    experts: Experts | None = fields["experts"]
    if kind == "glm4_moe_lite":
        mixed = () if experts is None else experts.layers
        hf["mlp_layer_types"] = [_SPARSE if layer in mixed else _DENSE for layer in range(count)]
    if experts is None or experts.router is None:
        return hf
    router = experts.router
    return {
        **hf,
        **{key: vars(experts)[field] for key, field in _OF_EXPERTS.items()},
        "norm_topk_prob": experts.norm_topk_prob,
        "first_k_dense_replace": experts.layers[0],
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "routed_scaling_factor": router.multiplier,
        "n_group": router.groups,
        "topk_group": router.groups_per_tok,
        **({"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" and router.groups > 1 else {}),
    }
