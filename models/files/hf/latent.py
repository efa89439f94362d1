"""Translation between ``config.json`` and an `Architecture`, for the families with latent attention."""

from typing import Any

from ...sizes.latent import Latent, query_scale
from ...sizes.parts import LayerRope
from . import experts
from . import families as hf_families

_OF_LATENT = {  # key of the file -> field of `Latent`
    "kv_lora_rank": "rank",
    "qk_rope_head_dim": "rotated",
    "qk_nope_head_dim": "key_dim",
    "v_head_dim": "value_dim",
    "q_lora_rank": "query_rank",
}
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


def read(hf: dict[str, Any]) -> dict[str, Any]:
    """Translate a ``config.json`` whose family has a latent; see `models.files.hf.config.read`."""
    kind = hf["model_type"]
    hf = {**_DEFAULTS[kind], **hf}
    experts.check_routed(hf)
    if type(hf["rope_interleave"]) is not bool:
        raise ValueError(f"rope_interleave must be true or false, got {hf['rope_interleave']!r:.60}")
    latent = Latent(
        **{field: hf[key] for key, field in _OF_LATENT.items()}, interleaved=kind == "deepseek_v2" or hf["rope_interleave"]
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
        "experts": experts.read_routed(hf),
    }


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate the fields of an Architecture with a latent; see `models.files.hf.config.write`."""
    kind, latent = fields["family"], fields["latent"]
    if latent is None:
        raise ValueError(f"a model of model_type {kind!r} needs a latent, got None")
    plain = {**fields, "ropes": (), "head_dim": latent.rotated, "num_kv_heads": fields["num_q_heads"]}
    return {
        **hf_families.write(plain),
        **{key: vars(latent)[field] for key, field in _OF_LATENT.items()},
        "rope_interleave": latent.interleaved,
        **experts.write_routed(fields),
    }
