"""Translation between ``config.json`` and experts: as Qwen and Mixtral have them, stacked, or with the router of DeepSeek."""

from typing import Any

from ...sizes.checks import check_counts, check_flags
from ...sizes.experts import Clamp, Experts, Router
from ..tables.families import FAMILIES as TABLE
from ..tables.families import ExpertFiles, Family

# A config.json with one of these keys declares another kind of experts; the supported families have none of the keys.
_FOREIGN = ("shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace", "n_group", "scoring_func")
_COUNTS = ("num_experts", "num_local_experts")  # both spellings
_INNER = {  # model_type -> the key of an expert's intermediate size
    "qwen3_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
    "qwen3_next": "moe_intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "olmoe": "intermediate_size",
}
_SHARED = "shared_expert_intermediate_size"
_SHARING = ("qwen3_next", "qwen2_moe")  # with an expert that every token uses
_SIZES = {"n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
          "moe_intermediate_size": "intermediate_size"}  # key of the file -> field of `Experts`  # fmt: skip
_MIXTRAL = {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
            "intermediate_size": "intermediate_size"}  # the same, with Mixtral's keys  # fmt: skip
_DENSE, _SPARSE = "dense", "sparse"
_CLAMP = {"swiglu_limit": "limit", "swiglu_alpha": "alpha"}  # key of config.json -> field of `Clamp`
_OF_QWEN = ("qwen3_moe", *_SHARING)  # with `mlp_only_layers`


def read(hf: dict[str, Any], family: Family) -> Experts | None:
    """Read the experts that ``config.json`` with all keys declares; None if no layer has experts."""
    if family.router:
        hf = {**hf, **family.fixed}
        check_routed(hf)
        return read_routed(hf)
    if family.expert_files is not None:
        return _read_stacked(hf, family.expert_files)
    kind = hf["model_type"]
    counts = {key: hf[key] for key in _COUNTS if hf.get(key) is not None}
    if kind not in _INNER:
        declared = {key: value for key, value in counts.items() if value}
        if declared:
            raise ValueError(f"model_type {kind!r} has no experts, got {declared}")
        return None
    foreign = [key for key in _FOREIGN if hf.get(key) and not (kind in _SHARING and key == _SHARED)]
    if foreign:
        raise ValueError(f"unsupported {foreign[0]}={hf[foreign[0]]!r} for model_type {kind!r}, expected none")
    absent = [key for key in (_INNER[kind], "num_experts_per_tok") if hf.get(key) is None]
    absent += [] if counts else [" or ".join(_COUNTS)]
    if absent:
        raise ValueError(f"config.json of model_type {kind!r} lacks {', '.join(absent)}")
    if any(value != next(iter(counts.values())) for value in counts.values()):
        raise ValueError(f"expected one number of experts, got {counts}")
    count, layers = next(iter(counts.values())), range(hf["num_hidden_layers"])
    if kind in _OF_QWEN:
        dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
        if not isinstance(dense, list) or any(type(layer) is not int or layer not in layers for layer in dense):
            raise ValueError(f"mlp_only_layers must be a list of layers below {len(layers)}, got {dense!r}")
        if type(step) is not int or step < 1:
            raise ValueError(f"decoder_sparse_step must be a whole number of at least 1, got {step!r}")
        layers = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
    if not layers or (kind in _OF_QWEN and count == 0):
        return None
    return Experts(
        num_experts=count,
        num_experts_per_tok=hf["num_experts_per_tok"],
        intermediate_size=hf[_INNER[kind]],
        norm_topk_prob=hf.get("norm_topk_prob", False) if kind != "mixtral" else True,
        layers=tuple(layers),
        shared_size=(hf.get(_SHARED) or 0) if kind in _SHARING else 0,
    )


def family_keys(experts: Experts | None, count: int, kind: str) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the experts of a model of ``count`` layers and of model type ``kind``."""
    keys = {"num_experts": 0}
    if experts is not None:
        keys = {
            "num_experts": experts.num_experts,
            "num_experts_per_tok": experts.num_experts_per_tok,
            "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.norm_topk_prob,
            "mlp_only_layers": [layer for layer in range(count) if layer not in experts.layers],
            "decoder_sparse_step": 1,
        }
    if kind == "qwen3_moe":
        return keys
    if kind == "mixtral":
        return {"num_local_experts": keys["num_experts"], "num_experts_per_tok": keys.get("num_experts_per_tok")}
    if kind in _SHARING:
        return keys | {_SHARED: 0 if experts is None else experts.shared_size}
    return {key: keys[key] for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob") if key in keys}


def _read_stacked(hf: dict[str, Any], files: ExpertFiles) -> Experts:
    """Read the experts of a family whose files have all experts of a layer in one tensor. Every layer has experts."""
    absent = [key for key in ("num_local_experts", "num_experts_per_tok") if hf.get(key) is None]
    if absent:
        raise ValueError(f"config.json of model_type {hf['model_type']!r} lacks {', '.join(absent)}")
    clamp = Clamp(**{field: hf[key] for key, field in _CLAMP.items() if hf.get(key) is not None}) if files.clamped else None
    return Experts(
        num_experts=hf["num_local_experts"],
        num_experts_per_tok=hf["num_experts_per_tok"],
        intermediate_size=hf["intermediate_size"],
        norm_topk_prob=True,
        layers=tuple(range(hf["num_hidden_layers"])),
        clamp=clamp,
    )


def write_stacked(experts: Experts | None) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the experts that `_read_stacked` reads."""
    if experts is None:
        return {}
    keys = {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.num_experts_per_tok}
    return keys if experts.clamp is None else {**keys, **{key: vars(experts.clamp)[field] for key, field in _CLAMP.items()}}


def check_routed(hf: dict[str, Any]) -> None:
    """Refuse keys of the experts whose values have the wrong type, or ask for parts that this decoder does not have."""
    kind = hf["model_type"]
    counts = (*_sizes(kind), *(key for key in ("n_group", "topk_group") if hf[key] is not None))
    check_counts("config.json", **{key: hf[key] for key in counts})
    check_counts("config.json", least=0, **{key: hf[key] for key in ("n_shared_experts", "first_k_dense_replace")})
    check_flags("config.json", norm_topk_prob=hf["norm_topk_prob"])
    score = TABLE[kind].router
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


def read_routed(hf: dict[str, Any]) -> Experts | None:
    """Read the experts of a file that `check_routed` accepts; None if no layer has experts."""
    layers = _mixed_layers(hf)
    if not layers:
        return None
    score = TABLE[hf["model_type"]].router
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
    return _MIXTRAL if TABLE[kind].mixtral_experts else _SIZES


def _mixed_layers(hf: dict[str, Any]) -> tuple[int, ...]:
    """List the layers with experts."""
    count, named = hf["num_hidden_layers"], hf.get("mlp_layer_types")
    if named is None or hf["model_type"] != "glm4_moe_lite":
        return tuple(range(min(hf["first_k_dense_replace"], count), count))
    if not isinstance(named, list) or len(named) != count or any(name not in (_DENSE, _SPARSE) for name in named):
        raise ValueError(f"mlp_layer_types must name {_DENSE!r} or {_SPARSE!r} for each of {count} layers, got {named!r:.80}")
    return tuple(layer for layer, name in enumerate(named) if name == _SPARSE)


def write_routed(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the experts of an Architecture: the inverse of `read_routed`."""
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
