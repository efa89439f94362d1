"""Translation between ``config.json`` and experts with DeepSeek's router (`models.layers.router`), beside any attention."""

from __future__ import annotations

from typing import Any

from ...sizes.experts import Experts, Router
from ..tables.families import FAMILIES

_SIZES = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
          "moe_intermediate_size": "intermediate_size"}  # key of the file -> field of `Experts`  # fmt: skip
_MIXTRAL = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
            "intermediate_size": "intermediate_size"}  # the same, with Mixtral's keys  # fmt: skip
_DENSE, _SPARSE = "dense", "sparse"


def check(hf: dict[str, Any]) -> None:
    """Refuse keys of the experts whose values have the wrong type, or ask for parts that this decoder does not have."""
    kind = hf["model_type"]
    for key in ("n_group", "topk_group"):
        if hf[key] is not None and (type(hf[key]) is not int or hf[key] < 1):
            raise ValueError(f"{key} must be a positive whole number or null, got {hf[key]!r:.60}")
    least = {"n_shared_experts": 0, "first_k_dense_replace": 0, **dict.fromkeys(_sizes(kind), 1)}
    for key, smallest in least.items():
        if type(hf[key]) is not int or not smallest <= hf[key] < 2**31:
            raise ValueError(f"{key} must be a whole number of at least {smallest}, got {hf[key]!r:.60}")
    if type(hf["norm_topk_prob"]) is not bool:
        raise ValueError(f"norm_topk_prob must be true or false, got {hf['norm_topk_prob']!r:.60}")
    score = FAMILIES[kind].router
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


def read(hf: dict[str, Any]) -> Experts | None:
    """Read the experts of a file that `check` accepts; None if no layer has experts."""
    layers = _mixed_layers(hf)
    if not layers:
        return None
    score = FAMILIES[hf["model_type"]].router
    grouped = score == "sigmoid" or hf["topk_method"] == "group_limited_greedy"
    sizes = {field: hf[key] for key, field in _sizes(hf["model_type"]).items()}
    return Experts(
        **sizes,
        norm_topk_prob=hf["norm_topk_prob"],
        layers=layers,
        router=Router(
            score=score,
            groups=(hf["n_group"] or 1) if grouped else 1,
            groups_per_tok=(hf["topk_group"] or 1) if grouped else 1,
            multiplier=hf["routed_scaling_factor"],
        ),
        shared_size=hf["n_shared_experts"] * sizes["intermediate_size"],
    )


def _sizes(kind: str) -> dict[str, str]:
    """Map the keys of the experts' sizes to fields of `Experts`."""
    return _MIXTRAL if FAMILIES[kind].mixtral_experts else _SIZES


def _mixed_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    """List the layers with experts."""
    count, named = hf["num_hidden_layers"], hf.get("mlp_layer_types")
    if named is None or hf["model_type"] != "glm4_moe_lite":
        return tuple(range(min(hf["first_k_dense_replace"], count), count))
    if not isinstance(named, list) or len(named) != count or any(name not in (_DENSE, _SPARSE) for name in named):
        raise ValueError(f"mlp_layer_types must name {_DENSE!r} or {_SPARSE!r} for each of {count} layers, got {named!r:.80}")
    return tuple(layer for layer, name in enumerate(named) if name == _SPARSE)


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the experts among the fields of an Architecture: the inverse of `read`."""
    kind, count = fields["family"], fields["num_layers"]
    experts: Experts | None = fields["experts"]
    hf: dict[str, Any] = {"first_k_dense_replace": count, "n_shared_experts": 0, "num_nextn_predict_layers": 0}
    if kind == "glm4_moe_lite":
        mixed = () if experts is None else experts.layers
        hf["mlp_layer_types"] = [_SPARSE if layer in mixed else _DENSE for layer in range(count)]
    if experts is None or experts.router is None:
        return hf
    router = experts.router
    return {
        **hf,
        **{key: vars(experts)[field] for key, field in _SIZES.items()},
        "norm_topk_prob": experts.norm_topk_prob,
        "first_k_dense_replace": experts.layers[0],
        "n_shared_experts": experts.shared_size // experts.intermediate_size,
        "routed_scaling_factor": router.multiplier,
        "n_group": router.groups,
        "topk_group": router.groups_per_tok,
        **({"topk_method": "group_limited_greedy"} if kind == "deepseek_v2" and router.groups > 1 else {}),
    }
