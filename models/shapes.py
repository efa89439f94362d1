"""The sizes of published models, for uses without weights: `kvjax.memory_needed`, `param_shapes`, timing on random weights.

Each function takes the dtype of computation and returns a `ModelConfig`, as `ModelConfig.from_hf` reads it from the model's
``config.json``.
"""

import dataclasses

from .config import ModelConfig
from .sizes.experts import Experts, Router
from .sizes.latent import Latent, query_scale
from .sizes.parts import LayerRope
from .sizes.rope_scaling import RopeScaling, YarnScaling

_LLAMA31_ROPE = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)


def llama3_8b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Meta-Llama-3-8B-Instruct."""
    return dataclasses.replace(
        llama31_8b(dtype), rope_scaling=None, max_position_embeddings=8192, eos_token_ids=(128009, 128001)
    )


def llama31_8b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Llama-3.1-8B-Instruct."""
    return ModelConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32, num_q_heads=32,
        num_kv_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=500000.0, rope_scaling=_LLAMA31_ROPE, eos_token_ids=(128001, 128008, 128009),
        dtype=dtype,
    )  # fmt: skip


def llama31_70b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Llama-3.1-70B-Instruct."""
    return dataclasses.replace(llama31_8b(dtype), hidden_size=8192, intermediate_size=28672, num_layers=80, num_q_heads=64)


def llama32_1b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Llama-3.2-1B-Instruct."""
    return dataclasses.replace(
        llama31_8b(dtype), hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64,
        rope_scaling=dataclasses.replace(_LLAMA31_ROPE, factor=32.0), tie_word_embeddings=True,
    )  # fmt: skip


def qwen3_8b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Qwen3-8B."""
    return ModelConfig(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_layers=36, num_q_heads=32,
        num_kv_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1000000.0, qk_norm=True, eos_token_ids=(151645, 151643), dtype=dtype,
    )  # fmt: skip


def qwen3_4b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Qwen3-4B."""
    return dataclasses.replace(qwen3_8b(dtype), hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)


def qwen3_0_6b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Qwen3-0.6B."""
    return dataclasses.replace(
        qwen3_8b(dtype), hidden_size=1024, intermediate_size=3072, num_layers=28, num_q_heads=16,
        tie_word_embeddings=True,
    )  # fmt: skip


def qwen25_7b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Qwen2.5-7B-Instruct."""
    return ModelConfig(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_layers=28, num_q_heads=28,
        num_kv_heads=4, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_theta=1000000.0, qkv_bias=True, eos_token_ids=(151645, 151643), dtype=dtype,
    )  # fmt: skip


def qwen25_1_5b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Qwen2.5-1.5B-Instruct and Qwen2.5-Coder-1.5B-Instruct."""
    return dataclasses.replace(
        qwen25_7b(dtype), vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_q_heads=12,
        num_kv_heads=2, tie_word_embeddings=True,
    )  # fmt: skip


def mistral_7b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Mistral-7B-Instruct-v0.3, which has no sliding window."""
    return ModelConfig(
        vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_layers=32, num_q_heads=32,
        num_kv_heads=8, head_dim=128, max_position_embeddings=32768, rms_norm_eps=1e-5,
        rope_theta=1000000.0, eos_token_ids=(2,), dtype=dtype,
    )  # fmt: skip


def yi_6b(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of Yi-6B."""
    return ModelConfig(
        vocab_size=64000, hidden_size=4096, intermediate_size=11008, num_layers=32, num_q_heads=32,
        num_kv_heads=4, head_dim=128, max_position_embeddings=4096, rms_norm_eps=1e-5,
        rope_theta=5000000.0, eos_token_ids=(2,), dtype=dtype,
    )  # fmt: skip


def deepseek_v2_lite(dtype: str = "bfloat16") -> ModelConfig:
    """Return the sizes of DeepSeek-V2-Lite-Chat, which has latent attention and experts."""
    latent, layers = Latent(rank=512, rotated=64, key_dim=128, value_dim=128), 27
    yarn = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
    experts = Experts(
        num_experts=64, num_experts_per_tok=6, intermediate_size=1408, norm_topk_prob=False, layers=tuple(range(1, layers)),
        shared_size=2 * 1408, router=Router(score="softmax"),
    )  # fmt: skip
    return ModelConfig(
        vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_layers=layers, num_q_heads=16,
        num_kv_heads=1, head_dim=latent.width, max_position_embeddings=163840, rms_norm_eps=1e-6, rope_scaling=yarn,
        ropes=(LayerRope(theta=10000.0, scaling=yarn, rotated=latent.rotated),) * layers, latent=latent, experts=experts,
        query_scale=query_scale(latent, yarn), eos_token_ids=(100001,), dtype=dtype, family="deepseek_v2",
    )  # fmt: skip
