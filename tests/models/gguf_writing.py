"""GGUF files for tests, written with the writer of the package ``gguf``.

Names, the order of rows, stacks of experts and the factors of RoPE are written here from llama.cpp's conversion script, not
with the code under test.
"""

import math
import re

import gguf
import numpy as np

QUANTS = gguf.GGMLQuantizationType
NAMES = {  # Hugging Face -> GGUF, inside of a layer
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.router": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "qwen3_next": "qwen3next"}
LESS_ONE = ("gemma3_text", "qwen3_next")  # whose norms have the factors less 1; llama.cpp adds it


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
    kind, heads = hf["model_type"], hf["num_attention_heads"]
    arch, rope = ARCHITECTURES.get(kind, kind), hf.get("rope_parameters") or {}
    head_dim = hf.get("head_dim") or hf["hidden_size"] // heads
    values = {
        "vocab_size": hf["vocab_size"],
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "block_count": hf["num_hidden_layers"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": hf["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(hf["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if kind in ("mistral", "gemma3_text", "gpt_oss", "phi3") and hf.get("sliding_window"):
        values["attention.sliding_window"] = hf["sliding_window"]
    if kind == "gemma3_text":
        full, near = rope["full_attention"], rope["sliding_attention"]
        values |= {"rope.freq_base": full["rope_theta"], "rope.freq_base_swa": near["rope_theta"],
                   "rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}  # fmt: skip
    if rope.get("rope_type") == "longrope":
        values["rope.scaling.original_context_length"] = hf["original_max_position_embeddings"]
    if kind == "gpt_oss":
        values |= {
            "rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "expert_count": hf["num_local_experts"], "expert_used_count": hf["num_experts_per_tok"],
            "expert_feed_forward_length": hf["intermediate_size"],
        }  # fmt: skip
    if kind == "qwen3_next":
        values |= {
            "expert_count": hf["num_experts"], "expert_used_count": hf["num_experts_per_tok"],
            "expert_feed_forward_length": hf["moe_intermediate_size"],
            "expert_shared_feed_forward_length": hf["shared_expert_intermediate_size"],
            "ssm.conv_kernel": hf["linear_conv_kernel_dim"], "ssm.state_size": hf["linear_key_head_dim"],
            "ssm.group_count": hf["linear_num_key_heads"], "ssm.time_step_rank": hf["linear_num_value_heads"],
            "ssm.inner_size": hf["linear_value_head_dim"] * hf["linear_num_value_heads"],
            "full_attention_interval": hf["layer_types"].index("full_attention") + 1,
        }  # fmt: skip
    end = hf.get("eos_token_id")
    ends = zip(("eos", "eot"), end if isinstance(end, list) else [end] * (end is not None))
    ends = {f"tokenizer.ggml.{key}_token_id": i for key, i in ends}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in values.items()}, **ends}


def heads_apart(hf, weight):
    """The rows of ``in_proj_qkvz`` in a loop over key heads: all queries, keys and values, and all gates."""
    count, key = hf["linear_num_key_heads"], hf["linear_key_head_dim"]
    value = hf["linear_num_value_heads"] // count * hf["linear_value_head_dim"]
    parts = [[], [], [], []]
    for head in np.split(weight, count):
        for rows, part in zip(parts, np.split(head, [key, 2 * key, 2 * key + value]), strict=True):
            rows.append(part)
    query, keys, values, gates = (np.concatenate(rows) for rows in parts)
    return np.concatenate([query, keys, values]), gates


def in_layer(hf, rest, value, legacy):
    """The tensors of a layer, by their names there, that hold the one with the name ``rest`` of a checkpoint."""
    kind, (stem, _, end) = hf["model_type"], rest.rpartition(".")
    if rest == "self_attn.sinks":
        return {"attn_sinks.weight": value}
    if stem == "mlp.experts":  # of gpt-oss: gate_up_proj, down_proj, and their biases
        bias = end.endswith("_bias")
        value = value if bias else value.swapaxes(1, 2)
        parts = {"gate": value[:, 0::2], "up": value[:, 1::2]} if end.startswith("gate_up") else {"down": value}
        return {f"ffn_{part}_exps.{'bias' if bias else 'weight'}": np.ascontiguousarray(x) for part, x in parts.items()}
    if stem == "post_attention_layernorm" and kind in (*LESS_ONE, "gpt_oss"):
        return {"post_attention_norm.weight": value}
    if end == "A_log":
        return {"ssm_a": -np.exp(value)}
    if end == "dt_bias":
        return {"ssm_dt.bias": value}
    if stem == "linear_attn.in_proj_qkvz":
        return (
            {"ssm_in.weight": value} if legacy else dict(zip(("attn_qkv.weight", "attn_gate.weight"), heads_apart(hf, value)))
        )
    if stem.endswith("conv1d") or (stem.endswith("shared_expert_gate") and not legacy):
        value = value.squeeze()
    turned = {"q_proj": hf["num_attention_heads"], "k_proj": hf["num_key_value_heads"]}.get(stem.rpartition(".")[2])
    if kind in ("llama", "mistral") and turned:
        value = pairs(value, turned)
    return {f"{NAMES[stem]}.{end}": value}


def stored(hf, weights, legacy=False):
    """The tensors as llama.cpp stores them, in float32: name -> array.

    ``legacy`` files of Qwen3-Next have the projections of linear attention in one tensor, and axes of one.
    """
    tensors, stacks = {}, {}
    for name, value in weights.items():
        value = np.asarray(value, np.float32)
        stem, _, end = name.rpartition(".")
        if hf["model_type"] in LESS_ONE and stem.endswith("norm") and "linear_attn" not in stem:
            value = value + 1
        if stem in TOP:
            tensors[f"{TOP[stem]}.{end}"] = value
            continue
        _, _, layer, rest = name.split(".", 3)
        if expert := re.fullmatch(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight", rest):
            stacks.setdefault(f"blk.{layer}.ffn_{expert[2]}_exps.weight", {})[int(expert[1])] = value
            continue
        tensors |= {f"blk.{layer}.{ours}": x for ours, x in in_layer(hf, rest, value, legacy).items()}
    tensors |= {name: np.stack([stack[i] for i in range(len(stack))]) for name, stack in stacks.items()}
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        head_dim = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        tensors["rope_freqs.weight"] = llama3_factors(rope, head_dim)
    if rope.get("rope_type") == "longrope":
        for kind in ("long", "short"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
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
