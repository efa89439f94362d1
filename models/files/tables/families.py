"""The families of models that load, and how their files name and store the parameters.

A family is data: the parts that all its models have, and the defaults of transformers' class for keys that a ``config.json``
may lack. `models.files.hf.families` translates the files, and `models.files.tables.checkpoint` names the tensors.

Source: the classes of transformers 5.24.
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

# Our norms of a layer, by the names of the file's tensors, for each `models.sizes.architecture.Architecture.norm_place`.
_BEFORE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_AFTER = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
_GEMMA = {"attention_norm": "input_layernorm", "attention_out_norm": "post_attention_layernorm",
          "mlp_norm": "pre_feedforward_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}  # fmt: skip
_GLM4 = {"attention_norm": "input_layernorm", "attention_out_norm": "post_self_attn_layernorm",
         "mlp_norm": "post_attention_layernorm", "mlp_out_norm": "post_mlp_layernorm"}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFiles:
    """The tensors of a family with all experts of a layer in one tensor, and their layout; see `models.files.tables.leaf`.

    The names are those behind ``model.layers.N.``.
    """

    router: str
    gate_up: str
    down: str
    gates: str
    turned: bool = False
    clamped: bool = False  # gpt-oss: biases, and the gate of `models.sizes.experts.Clamp`


GPT_OSS = ExpertFiles(
    router="mlp.router.weight", gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", gates="neighbours",
    clamped=True,
)  # fmt: skip
GRANITE = ExpertFiles(
    router="block_sparse_moe.router.layer.weight", gate_up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight", gates="halves", turned=True,
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What the files of one ``model_type`` say and how they store it."""

    name: str  # for people
    class_name: str  # prefix of transformers' classes
    parts: Mapping[str, Any] = types.MappingProxyType({})  # fields of ModelConfig that all models of the family have
    defaults: Mapping[str, Any] = types.MappingProxyType({})  # keys that a file may lack -> value in transformers' class
    numbers: Mapping[str, str] = types.MappingProxyType({})  # further keys of the file -> field, see `hf_families`
    norms: Mapping[str, str] = types.MappingProxyType(_BEFORE)  # our norm -> name in the file
    norm_offset: float = 0.0  # the file's norm weights are the factors less this number
    fused_qkv: bool = False  # one tensor has the rows of q, k and v
    fused_gate_up: bool = False  # one tensor has the rows of gate and up
    interleaved: bool = False  # RoPE rotates neighbouring channels
    partial: bool = False  # RoPE may rotate a part of each head
    required: tuple[str, ...] = ()  # keys that a file must have, beside the sizes that all have
    refused: str = ""  # for people: what a file of this type may ask for and does not get
    windows: str = "none"  # layers with a window: "none", "all" or "some"
    optional_window: bool = False  # a null sliding_window means full attention in layers that would have a window
    two_ropes: bool = False  # layers with a window and layers without have a rotation of their own
    rotates: str = "all"  # layers with RoPE: "all", "windows" (of a model that has windows) or "listed"
    linear: str = ""  # layers of linear attention: "" for none; "fused" or "apart": how the file stores their projections
    unread: str = ""  # tensors whose names begin so belong to a part that this decoder does not run
    experts: bool = False  # layers may have experts, see `models.layers.experts`
    expert_files: ExpertFiles | None = None  # every layer has experts, all in one tensor of the file
    qkv_bias_key: str = ""  # the key that adds a bias to q, k and v; "": no key does
    out_bias_key: str = ""  # the key that adds a bias to the output of attention; "": no key does
    router: str = ""  # the score of DeepSeek's router, see `models.files.hf.experts`; "": the family does not have it
    latent: bool = False  # latent attention, see `models.files.hf.latent`
    qk_norm_key: bool = False  # use_qk_norm adds norms of each query and key head
    mixtral_experts: bool = False  # beside a `router`: experts have Mixtral's keys and tensors, and every layer has them
    fixed: Mapping[str, Any] = types.MappingProxyType({})  # key of the file -> the only value that is computed


_KV_HEADS = ("num_key_value_heads",)
_SILU = {"hidden_act": "silu"}
_GEMMA_PARTS = {"norm_place": "both"}
_GEMMA_NUMBERS = {"query_pre_attn_scalar": "query_scale", "final_logit_softcapping": "logit_softcap"}
_GEMMA_DEFAULTS = {
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "rms_norm_eps": 1e-6,
}  # fmt: skip
_GLM_DEFAULTS = {"head_dim": 128, "partial_rotary_factor": 0.5, "attention_bias": True, "rms_norm_eps": 1.5625e-7}
_QWEN_PARTS = {"qk_norm": True, "output_gate": True}
_LINEAR_DEFAULTS = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
}  # fmt: skip
_QWEN_DEFAULTS = {
    **_LINEAR_DEFAULTS, "head_dim": 256, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "num_attention_heads": 16,
    "max_position_embeddings": 32768,
}  # fmt: skip
_GRANITE_NUMBERS = {
    "embedding_multiplier": "embedding_multiplier", "residual_multiplier": "residual_multiplier",
    "attention_multiplier": "query_scale", "logits_scaling": "logits_multiplier",
}  # fmt: skip
_GRANITE_DEFAULTS = dict.fromkeys(_GRANITE_NUMBERS, 1.0)
_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_COHERE_PARTS = {"norm": "layer", "norm_place": "parallel"}
_COHERE_NORMS = {"attention_norm": "input_layernorm"}
_COHERE_DEFAULTS = {"tie_word_embeddings": True, "logit_scale": 0.0625, "layer_norm_eps": 1e-5}
_QWEN_WINDOWS = {"use_sliding_window": False, "sliding_window": 4096}
_BLOCKS = "weights of 8 bits in blocks, which published models have"

# Families that a config names by its parts alone, `Architecture.family` being "".
INFERRED = {
    "llama": Family(name="Llama 3, Yi, SmolLM2", class_name="Llama", fixed=_SILU),
    "mistral": Family(
        name="Mistral", class_name="Mistral", windows="all", required=_KV_HEADS, defaults={"sliding_window": 4096},
        fixed=_SILU,
    ),
    "qwen2": Family(
        name="Qwen 2, Qwen 2.5", class_name="Qwen2", parts={"qkv_bias": True}, windows="some", required=_KV_HEADS,
        optional_window=True, defaults={**_QWEN_WINDOWS, "max_window_layers": 28}, fixed=_SILU,
    ),
    "qwen3": Family(
        name="Qwen 3, dense", class_name="Qwen3", parts={"qk_norm": True}, windows="some", required=_KV_HEADS,
        optional_window=True, defaults={**_QWEN_WINDOWS, "max_window_layers": 28, "head_dim": 128}, fixed=_SILU,
    ),
    "qwen3_moe": Family(
        name="Qwen 3, experts", class_name="Qwen3Moe", parts={"qk_norm": True}, windows="all", required=_KV_HEADS,
        experts=True, defaults=_QWEN_WINDOWS, fixed=_SILU,
    ),
    "mixtral": Family(
        name="Mixtral", class_name="Mixtral", windows="all", required=_KV_HEADS, experts=True, fixed=_SILU,
        defaults={"sliding_window": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    ),
}  # fmt: skip
FAMILIES = {
    "gemma2": Family(
        name="Gemma 2", class_name="Gemma2", parts=_GEMMA_PARTS, norms=_GEMMA, norm_offset=1.0, windows="some",
        numbers={**_GEMMA_NUMBERS, "attn_logit_softcapping": "attention_softcap"}, refused="attention to later tokens",
        defaults={
            **_GEMMA_DEFAULTS, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0, "sliding_window_pattern": 2,
        },
    ),
    "gemma3_text": Family(
        name="Gemma 3, text", class_name="Gemma3", parts={**_GEMMA_PARTS, "qk_norm": True}, numbers=_GEMMA_NUMBERS,
        refused="attention to later tokens", norms=_GEMMA, norm_offset=1.0, windows="some", two_ropes=True,
        defaults={**_GEMMA_DEFAULTS, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6},
    ),
    "olmo2": Family(
        name="OLMo 2", class_name="Olmo2", parts={"norm_place": "after", "wide_qk_norm": True}, norms=_AFTER,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo3": Family(
        name="OLMo 3", class_name="Olmo3", parts={"norm_place": "after", "wide_qk_norm": True}, norms=_AFTER, windows="some",
        two_ropes=True,
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "smollm3": Family(
        name="SmolLM3", class_name="SmolLM3", refused="biases in the MLP", qkv_bias_key="attention_bias",
        out_bias_key="attention_bias", rotates="listed", windows="some", optional_window=True,
        defaults={
            "rope_theta": 2e6, "no_rope_layer_interval": 4, "tie_word_embeddings": True, "use_sliding_window": False,
        },
    ),
    "phi3": Family(
        name="Phi-3, Phi-4", class_name="Phi3", fused_qkv=True, fused_gate_up=True, windows="all", partial=True,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
    ),
    "glm": Family(
        name="GLM-4 (2024)", class_name="Glm", fused_gate_up=True, interleaved=True, partial=True,
        qkv_bias_key="attention_bias", defaults=_GLM_DEFAULTS,
    ),
    "glm4": Family(
        name="GLM-4 (0414)", class_name="Glm4", parts={"norm_place": "both"}, norms=_GLM4, fused_gate_up=True,
        interleaved=True, partial=True, qkv_bias_key="attention_bias", defaults=_GLM_DEFAULTS,
    ),
    "granite": Family(
        name="Granite 3, dense", class_name="Granite", refused="biases in the MLP", qkv_bias_key="attention_bias",
        out_bias_key="attention_bias", numbers=_GRANITE_NUMBERS, defaults=_GRANITE_DEFAULTS,
    ),
    "granitemoe": Family(
        name="Granite 3, experts", class_name="GraniteMoe", qkv_bias_key="attention_bias", out_bias_key="attention_bias",
        numbers=_GRANITE_NUMBERS, defaults={**_GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
        expert_files=GRANITE,
    ),
    "gpt_oss": Family(
        name="gpt-oss", class_name="GptOss", parts={"attention_sinks": True}, qkv_bias_key="attention_bias",
        out_bias_key="attention_bias", windows="some", expert_files=GPT_OSS,
        defaults={
            "head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2, "rms_norm_eps": 1e-5, "rope_theta": 1.5e5,
            "attention_bias": True, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_limit": 7.0,
            "swiglu_alpha": 1.702, "rope_scaling": _GPT_OSS_ROPE,
        },
    ),
    "cohere": Family(
        name="Command R", class_name="Cohere", parts=_COHERE_PARTS, norms=_COHERE_NORMS, interleaved=True,
        refused="LayerNorm of q and k", numbers={"logit_scale": "logits_multiplier"},
        defaults={**_COHERE_DEFAULTS, "rope_theta": 5e5},
    ),
    "cohere2": Family(
        name="Command R7B, Command A", class_name="Cohere2", parts=_COHERE_PARTS, norms=_COHERE_NORMS, interleaved=True,
        windows="some", rotates="windows", numbers={"logit_scale": "logits_multiplier"},
        defaults={**_COHERE_DEFAULTS, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "exaone4": Family(
        name="EXAONE 4", class_name="Exaone4", parts={"norm_place": "after", "qk_norm": True}, norms=_AFTER, windows="some",
        optional_window=True, rotates="windows",
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "arcee": Family(
        name="Arcee", class_name="Arcee", parts={"mlp_gate": False}, qkv_bias_key="attention_bias",
        out_bias_key="attention_bias", refused="biases in the MLP", defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
    ),
    "seed_oss": Family(
        name="Seed-OSS", class_name="SeedOss", qkv_bias_key="attention_bias", out_bias_key="attention_out_bias",
        defaults={"head_dim": 128, "attention_bias": True},
    ),
    "ernie4_5": Family(
        name="ERNIE 4.5, dense", class_name="Ernie4_5", interleaved=True, refused="biases", fixed={"use_bias": False},
        defaults={
            "head_dim": 128, "num_key_value_heads": 2, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        },
    ),
    "olmoe": Family(
        name="OLMoE", class_name="Olmoe", parts={"wide_qk_norm": True}, experts=True, refused="limits of q, k and v",
        fixed={"clip_qkv": None},
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    ),
    "qwen2_moe": Family(
        name="Qwen 1.5 and 2, experts", class_name="Qwen2Moe", experts=True, qkv_bias_key="qkv_bias", refused="windows",
        fixed={"use_sliding_window": False, "layer_types": "full_attention"},
        defaults={
            "num_key_value_heads": 16, "qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False,
        },
    ),
    "qwen3_next": Family(
        name="Qwen3-Next", class_name="Qwen3Next", parts=_QWEN_PARTS, norm_offset=1.0, partial=True, linear="fused",
        experts=True, unread="mtp.", refused="biases",
        defaults={
            **_QWEN_DEFAULTS, "intermediate_size": 5632, "num_key_value_heads": 2, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_5_text": Family(
        name="Qwen3.5, text, dense", class_name="Qwen3_5", parts=_QWEN_PARTS, norm_offset=1.0, partial=True, linear="apart",
        unread="mtp.", refused="biases", defaults={**_QWEN_DEFAULTS, "num_key_value_heads": 4},
    ),
    "deepseek_v2": Family(name="DeepSeek-V2, V2-Lite", class_name="DeepseekV2", router="softmax", latent=True),
    "deepseek_v3": Family(name="DeepSeek-V3, R1", class_name="DeepseekV3", router="sigmoid", latent=True, refused=_BLOCKS),
    "kimi_k2": Family(name="Kimi K2", class_name="DeepseekV3", router="sigmoid", latent=True, refused=_BLOCKS),
    "glm4_moe": Family(
        name="GLM-4.5, 4.6, 4.7", class_name="Glm4Moe", partial=True, qkv_bias_key="attention_bias", qk_norm_key=True,
        router="sigmoid",
        defaults={
            "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "n_routed_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408, "n_shared_experts": 1, "routed_scaling_factor": 1.0, "n_group": 1,
            "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "num_key_value_heads": 8,
        },
    ),
    "minimax_m2": Family(
        name="MiniMax-M2", class_name="MiniMaxM2", parts={"wide_qk_norm": True}, partial=True, router="sigmoid",
        mixtral_experts=True, refused=_BLOCKS, defaults={
            "head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6, "rotary_dim": None, "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        fixed={
            "use_qk_norm": True, "qk_norm_type": "per_layer", "attn_type_list": 1, "use_routing_bias": True,
            "shared_intermediate_size": 0, "n_shared_experts": 0, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": True, "routed_scaling_factor": 1.0,
        },
    ),
    "glm4_moe_lite": Family(
        name="GLM-4.7-Flash", class_name="Glm4MoeLite", router="sigmoid", latent=True, defaults={"rms_norm_eps": 1e-5}
    ),
}  # fmt: skip

ALL = {**INFERRED, **FAMILIES}
# Types that people ask for and that this decoder cannot run: the part that is missing.
MISSING = {
    "qwen3_5": "an encoder of images; its text model has model_type 'qwen3_5_text'",
    "gemma3": "an encoder of images, and this file has no text_config, whose model_type is 'gemma3_text'",
    "gemma3n_text": "keys and values shared between layers",
    "gemma4_text": "keys and values shared between layers",
    "llama4_text": "attention in chunks",
    "granitemoehybrid": "layers of a state-space model",
    "hunyuan_v1_dense": "norms of queries and keys after RoPE",
    "hunyuan_v1_moe": "norms of queries and keys after RoPE",
    "ernie4_5_moe": "a softmax router whose choice has a bias",
    "apertus": "an activation with learned numbers",
}


def channel_order(head_dim: int, rotated: int, interleaved: bool) -> tuple[int, ...]:
    """Return which channel of the file is channel i of a query or key here; () if the order is the same.

    Attention only sees products of queries and keys, which do not change if both have their channels in another order. Here
    the pair i is the channels i and i + D/2, and the first pairs rotate. In files it is i and i + R/2, or 2 i and 2 i + 1.
    """
    if not rotated or (rotated == head_dim and not interleaved):
        return ()
    half, rest = rotated // 2, (head_dim - rotated) // 2
    first = [2 * i if interleaved else i for i in range(half)]
    second = [2 * i + 1 if interleaved else i + half for i in range(half)]
    tail = list(range(rotated, head_dim))
    return (*first, *tail[:rest], *second, *tail[rest:])
