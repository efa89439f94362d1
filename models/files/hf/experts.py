"""Translation between ``config.json`` and experts of the kinds that Qwen and Mixtral have."""

from __future__ import annotations

from typing import Any

from ...sizes.experts import Experts

# A config.json with one of these keys declares another kind of experts; the supported families have none of the keys.
_FOREIGN = ("shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace", "n_group", "scoring_func")
_COUNTS = ("num_experts", "num_local_experts")  # both spellings
FAMILIES = {  # model_type -> the key of an expert's intermediate size
    "qwen3_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
    "qwen3_next": "moe_intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "olmoe": "intermediate_size",
}
_SHARED = "shared_expert_intermediate_size"
_SHARING = ("qwen3_next", "qwen2_moe")  # with an expert that every token uses
_OF_QWEN = ("qwen3_moe", *_SHARING)  # with `mlp_only_layers`


def read(hf: dict[str, Any]) -> Experts | None:
    """Read the experts that ``config.json`` declares; None if no layer has experts."""
    kind = hf["model_type"]
    counts = {key: hf[key] for key in _COUNTS if hf.get(key) is not None}
    if kind not in FAMILIES:
        declared = {key: value for key, value in counts.items() if value}
        if declared:
            raise ValueError(f"model_type {kind!r} has no experts, got {declared}")
        return None
    foreign = [key for key in _FOREIGN if hf.get(key) and not (kind in _SHARING and key == _SHARED)]
    if foreign:
        raise ValueError(f"unsupported {foreign[0]}={hf[foreign[0]]!r} for model_type {kind!r}, expected none")
    absent = [key for key in (FAMILIES[kind], "num_experts_per_tok") if hf.get(key) is None]
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
        intermediate_size=hf[FAMILIES[kind]],
        norm_topk_prob=hf.get("norm_topk_prob", False) if kind != "mixtral" else True,
        layers=tuple(layers),
        shared_size=(hf.get(_SHARED) or 0) if kind in _SHARING else 0,
    )


def _qwen_keys(experts: Experts | None, count: int) -> dict[str, Any]:
    """Return the keys of ``config.json`` for experts of Qwen's kind in a model of ``count`` layers."""
    if experts is None:
        return {"num_experts": 0}
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "mlp_only_layers": [layer for layer in range(count) if layer not in experts.layers],
        "decoder_sparse_step": 1,
    }


def family_keys(experts: Experts | None, count: int, kind: str) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the experts of a model of ``count`` layers and of model type ``kind``."""
    keys = _qwen_keys(experts, count)
    if kind == "qwen3_moe":
        return keys
    if kind == "mixtral":
        return {"num_local_experts": keys["num_experts"], "num_experts_per_tok": keys.get("num_experts_per_tok")}
    if kind in _SHARING:
        return keys | {_SHARED: 0 if experts is None else experts.shared_size}
    return {key: keys[key] for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob") if key in keys}
