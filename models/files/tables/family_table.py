"""Which families load, and the parts of each: rows for ``kvjax ls families`` and for the documentation."""

import dataclasses
from collections.abc import Callable

from .families import ALL, Family

_PLACES = {"after": "norms after attention and MLP", "both": "norms before and after attention and MLP",
           "parallel": "attention and MLP beside each other"}  # fmt: skip
_NUMBERS = {
    "attention_softcap": "soft cap of the logits in attention",
    "query_scale": "query scale", "logit_softcap": "soft cap of the logits", "logits_multiplier": "logits multiplier",
    "embedding_multiplier": "embedding multiplier", "residual_multiplier": "residual multiplier",
}  # fmt: skip
_PARTS: tuple[Callable[[Family], str], ...] = (
    lambda f: {"all": "windows in all layers", "some": "windows in some layers"}.get(f.windows, ""),
    lambda f: "linear attention in some layers" * bool(f.linear),
    lambda f: "an output gate in attention" * bool(f.parts.get("output_gate")),
    lambda f: f"experts{' and a shared expert' * ('shared_expert_intermediate_size' in f.defaults)}" * f.experts,
    lambda f: "a RoPE for layers with a window and one for the others" * f.two_ropes,
    lambda f: {"windows": "RoPE in layers with a window only", "listed": "RoPE in some layers"}.get(f.rotates, ""),
    lambda f: "RoPE on a part of each head" * f.partial,
    lambda f: "RoPE on neighbouring channels" * f.interleaved,
    lambda f: "norms of each q and k head" * bool(f.parts.get("qk_norm")),
    lambda f: "norms of all q heads and of all k heads" * bool(f.parts.get("wide_qk_norm")),
    lambda f: _PLACES.get(f.parts.get("norm_place", ""), ""),
    lambda f: "LayerNorm" * (f.parts.get("norm") == "layer"),
    lambda f: "norm weights less 1" * bool(f.norm_offset),
    lambda f: "an MLP without a gate" * (not f.parts.get("mlp_gate", True)),
    lambda f: "GELU" * ("hidden_activation" in f.defaults),
    lambda f: "embedding scale" * ("query_pre_attn_scalar" in f.numbers),
    lambda f: ", ".join(_NUMBERS[field] for field in f.numbers.values()),
    lambda f: "sink logits" * bool(f.parts.get("attention_sinks")),
    lambda f: "bias on q, k and v" * (bool(f.qkv_bias_key or f.parts.get("qkv_bias")) and f.out_bias_key != "attention_bias"),
    lambda f: "bias on q, k, v and the output" * (f.out_bias_key == "attention_bias"),
    lambda f: "bias on the output" * (f.out_bias_key == "attention_out_bias"),
    lambda f: "" if f.expert_files is None else f"experts{' with biases and a clamped gate' * f.expert_files.clamped}",
    lambda f: "fused q, k and v" * f.fused_qkv,
    lambda f: "fused gate and up" * f.fused_gate_up,
    lambda f: "norms of each q and k head in some models" * f.qk_norm_key,
    lambda f: "latent attention (MLA)" * f.latent,
    lambda f: f"experts with a {f.router} router{', and a shared expert' * (not f.mixtral_experts)}" * bool(f.router),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One ``model_type``."""

    model_type: str
    models: str
    parts: str  # beside Llama's; "" for none
    refused: str  # what a file of this type may ask for and does not get


def rows() -> tuple[Row, ...]:
    """List every ``model_type`` that loads."""
    described = {kind: "; ".join(text for part in _PARTS if (text := part(family))) for kind, family in ALL.items()}
    return tuple(Row(kind, family.name, described[kind], family.refused) for kind, family in ALL.items())
