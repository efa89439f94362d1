"""GGUF files for tests, written with the writer of the package ``gguf``. Also run by experiments/lab/goldens with torch.

The order of Q and K rows, the names and the factors of RoPE are written here from llama.cpp's conversion script, not with the
code under test.
"""

from __future__ import annotations

import math

import gguf
import numpy as np

QUANTS = gguf.GGMLQuantizationType
NAMES = {  # Hugging Face -> GGUF, inside of a layer
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    """'model.layers.0.mlp.up_proj.weight' -> 'blk.0.ffn_up.weight'."""
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{kind}"


def pairs(weight, heads):
    """Rows of each head with the two channels that RoPE turns side by side, as llama.cpp stores them for llama."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(rope, head_dim):
    """What each RoPE frequency is divided by under Llama 3.1's rule, in loops."""
    factors = []
    for i in range(head_dim // 2):
        wave = 2 * math.pi * rope["rope_theta"] ** (2 * i / head_dim)
        old, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        if wave < old / high:
            factors.append(1.0)
        elif wave > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wave - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def metadata(hf):
    """The metadata of a model from its config.json, except its tokenizer: key -> value."""
    arch = {"mistral": "llama"}.get(hf["model_type"], hf["model_type"])
    rope = hf.get("rope_parameters") or {}
    heads = hf["num_attention_heads"]
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    window = hf.get("sliding_window") if hf["model_type"] == "mistral" else None
    return {
        **({f"{arch}.attention.sliding_window": window} if window else {}),
        "general.architecture": arch,
        f"{arch}.vocab_size": hf["vocab_size"],
        f"{arch}.context_length": hf["max_position_embeddings"],
        f"{arch}.embedding_length": hf["hidden_size"],
        f"{arch}.block_count": hf["num_hidden_layers"],
        f"{arch}.feed_forward_length": hf["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": hf["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(hf["rms_norm_eps"]),
        f"{arch}.rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        f"{arch}.rope.dimension_count": head_dim,
    }


def stored(hf, weights):
    """The tensors as llama.cpp stores them, in float32: name -> array."""
    tensors = {}
    for name, value in weights.items():
        value = np.asarray(value, np.float32)
        if hf["model_type"] in ("llama", "mistral") and ".q_proj." in name:
            value = pairs(value, hf["num_attention_heads"])
        if hf["model_type"] in ("llama", "mistral") and ".k_proj." in name:
            value = pairs(value, hf["num_key_value_heads"])
        tensors[gguf_name(name)] = value
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        tensors["rope_freqs.weight"] = llama3_factors(rope, head_dim)
    return tensors


def write(path, values, tensors, kinds=None, endian=gguf.GGUFEndian.LITTLE):
    """Write a GGUF file. ``values`` is its metadata. ``kinds`` gives the quantisation of tensors by name; others are F32."""
    writer = gguf.GGUFWriter(path, values["general.architecture"], endianess=endian)
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif key != "general.architecture":  # which the writer adds itself
            writer.add_string(key, value)
    for name, value in tensors.items():
        kind = (kinds or {}).get(name, QUANTS.F32)
        if kind in (QUANTS.F32, QUANTS.F16):
            writer.add_tensor(name, value.astype(np.float32 if kind == QUANTS.F32 else np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokenizer_metadata(tokens, merges, pre, kinds=None, **values):
    """The metadata of a byte-level tokenizer; ``values`` are further keys after 'tokenizer.ggml.'."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": list(kinds or [1] * len(tokens)),
        "tokenizer.ggml.merges": list(merges),
        **{f"tokenizer.ggml.{key}": value for key, value in values.items()},
    }
