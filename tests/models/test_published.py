"""Configurations of published models: what they declare has the number of parameters that their weights have."""

from __future__ import annotations

import json
import math

import jax
import pytest

import models

SHARED = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}
QUICK = ("gemma-3-270m", "phi-4-mini")
# What a config.json of the hub says, and the number of parameters of its weights. For GLM-4.5, MiniMax-M2, OLMoE, Qwen1.5 and
# ERNIE it is the number of transformers' classes, with the biases of routers.
PUBLISHED = {
    "gemma-3-270m": (268_098_176, {
        "model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 1e4, "rope_theta": 1e6, "rope_scaling": None,
        "sliding_window": 512, "_sliding_window_pattern": 6, "vocab_size": 262144, "use_bidirectional_attention": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    }),
    "phi-4-mini": (3_836_021_760, {
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
        "num_attention_heads": 24, "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 200064,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75, "sliding_window": 262144,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48},
        "tie_word_embeddings": True,
    }),
    "smollm3-3b": (3_075_098_624, {
        "model_type": "smollm3", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 65536, "vocab_size": 128256,
        "no_rope_layer_interval": 4, "sliding_window": None, "use_sliding_window": False, "rope_theta": 5e6,
    }),
    "olmo-3-7b": (7_298_011_136, {
        **SHARED, "model_type": "olmo3", "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "max_position_embeddings": 65536, "vocab_size": 100278, "sliding_window": 4096, "rope_theta": 5e5,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
    }),
    "glm-4-9b-0414": (9_400_279_040, {
        **SHARED, "model_type": "glm4", "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "vocab_size": 151552, "partial_rotary_factor": 0.5, "attention_bias": True,
    }),
    "gpt-oss-20b": (20_914_757_184, {
        "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        "vocab_size": 201088, "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rope_theta": 150000,
        "swiglu_limit": 7.0, "attention_bias": True, "quantization_config": {"quant_method": "mxfp4"},
        "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                         "original_max_position_embeddings": 4096},
    }),
    "command-r7b": (8_028_033_024, {
        **SHARED, "model_type": "cohere2", "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 256000,
        "max_position_embeddings": 8192, "logit_scale": 0.25, "sliding_window": 4096, "sliding_window_pattern": 4,
        "rope_theta": 5e4,
    }),
    "glm-4.5-air": (106_852_251_264, {
        "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
        "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072,
        "vocab_size": 151552, "partial_rotary_factor": 0.5, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "attention_bias": True,
        "use_qk_norm": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": 128,
        "moe_intermediate_size": 1408, "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "rope_scaling": None,
    }),
    "minimax-m2": (228_689_764_864, {
        "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
        "vocab_size": 200064, "rotary_dim": 64, "rope_theta": 5000000, "num_local_experts": 256, "num_experts_per_tok": 8,
        "attn_type_list": [1] * 62, "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid",
        "use_routing_bias": True, "shared_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False,
    }),
    "ernie-4.5-0.3b": (360_748_032, {
        "model_type": "ernie4_5", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "vocab_size": 103424, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "use_bias": False, "tie_word_embeddings": True,
    }),
    "olmoe-1b-7b": (6_919_161_856, {
        "model_type": "olmoe", "hidden_size": 2048, "intermediate_size": 1024, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 4096, "vocab_size": 50304,
        "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None, "rope_scaling": None,
    }),
    "qwen1.5-moe-a2.7b": (14_315_784_192, {
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192, "vocab_size": 151936,
        "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21,
        "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts": 60,
        "num_experts_per_tok": 4, "norm_topk_prob": False,
    }),
    "qwen3-next-80b-a3b": (79_674_391_296, {
        "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 262144,
        "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_scaling": None, "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_value_head_dim": 128, "mlp_only_layers": [], "decoder_sparse_step": 1, "num_experts": 512,
        "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True, "vocab_size": 151936,
    }),
    "qwen3.5-9b, of transformers": (8_953_803_264, {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "vocab_size": 248320, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    }),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.thorough] * (x not in QUICK)) for x in PUBLISHED]
)
def test_a_published_config_has_the_published_number_of_parameters(name):
    count, hf = PUBLISHED[name]
    config = models.ModelConfig.from_hf(hf)
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(models.param_shapes(config))) == count
    assert models.ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
