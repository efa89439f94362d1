"""Golden outputs of the ``transformers`` PyTorch classes on tiny random models of our families.

Run with torch and transformers installed, from any directory::

    python make_goldens.py [NAME ...]

A file holds no weights: `weights` draws them again from the names and shapes of the checkpoint's tensors. It holds

* ``config``, the JSON text that transformers writes, and ``shapes``, a JSON object of the tensors' names and shapes;
* ``tokens`` int64 [ROWS, LENGTH], and ``prompts`` int64 [ROWS], how many tokens of each row are its prompt;
* ``hidden`` float32 [L, 4, d], the residual stream of row 0 after each layer, at the last four tokens;
* ``logits`` float32 [LENGTH, V] of row 0 in one pass;
* ``decoded`` float32 [ROWS, STEPS, V], of each row alone: after its prompt, and after each of the next tokens, which come one
  at a time and find the earlier keys in a cache.
"""

import json
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
SEED = 20261127
LENGTH, STEPS = 24, 9
PROMPTS = (15, 9, 3)  # longer and shorter than the window
WINDOW = 6
TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "bos_token_id": None, "pad_token_id": None,
    "eos_token_id": 7, "attn_implementation": "eager", "tie_word_embeddings": False,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 100.0}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
    "attention_factor": 1.2,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 12,
    "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.5, 5.0],
}  # fmt: skip
DEEPSEEK = {  # experts of DeepSeek's kind
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "n_shared_experts": 2,
    "routed_scaling_factor": 1.5, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": ROPE,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
LATENT = {
    **DEEPSEEK, "num_key_value_heads": 4, "head_dim": 6, "kv_lora_rank": 10, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8,
    "v_head_dim": 12, "q_lora_rank": 14,
}  # fmt: skip
ROUTED = {**DEEPSEEK, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "rms_norm_eps": 1e-5}
MSCALES = {"rope_parameters": {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0,
    "mscale": 0.7, "mscale_all_dim": 0.9,
}}  # fmt: skip
RENAMED = {"kimi_k2": "kimi_k2"}  # name -> model_type of a file that transformers reads with the class of another type
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
LINEAR_LAYERS = {  # the gated delta rule; channels, heads and dimensions are all of different number
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 0.01,  # outputs of the rule can be small, and a norm would enlarge their rounding errors
}  # fmt: skip
MODELS = {  # name -> (class prefix in transformers, the name of its config's class, what differs from TINY)
    "gemma2": ("Gemma2", "Gemma2", {**WINDOWS, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
                                   "query_pre_attn_scalar": 8, "tie_word_embeddings": True}),
    "gemma3_text": ("Gemma3", "Gemma3Text", {**WINDOWS, "query_pre_attn_scalar": 11, "tie_word_embeddings": True,
                                            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": ROPE}}),
    "olmo2": ("Olmo2", "Olmo2", {"rope_parameters": ROPE}),
    "olmo3": ("Olmo3", "Olmo3", {**WINDOWS, "rope_parameters": {"full_attention": YARN, "sliding_attention": ROPE}}),
    "smollm3": ("SmolLM3", "SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True, "rope_parameters": ROPE,
                                      "attention_bias": True}),
    "phi3": ("Phi3", "Phi3", {"sliding_window": WINDOW, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
                             "hidden_size": 32}),
    "phi4_longrope": ("Phi3", "Phi3", {"original_max_position_embeddings": 12, "rope_parameters": LONGROPE,
                                      "hidden_size": 32}),
    "glm": ("Glm", "Glm", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "attention_bias": True}),
    "glm4": ("Glm4", "Glm4", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "attention_bias": True}),
    "granite": ("Granite", "Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "rope_parameters": ROPE,
                                      "attention_multiplier": 0.3, "logits_scaling": 2.5, "attention_bias": True}),
    "cohere": ("Cohere", "Cohere", {"hidden_size": 32, "rope_parameters": ROPE, "logit_scale": 0.25,
                                   "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", "Cohere2", {**WINDOWS, "hidden_size": 32, "rope_parameters": ROPE, "logit_scale": 0.25,
                                      "tie_word_embeddings": True}),
    "exaone4": ("Exaone4", "Exaone4", {**WINDOWS, "rope_parameters": ROPE}),
    "exaone4_full": ("Exaone4", "Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3,
                                           "rope_parameters": ROPE, "num_key_value_heads": 1}),
    "seed_oss": ("SeedOss", "SeedOss", {"rope_parameters": ROPE, "attention_bias": True, "attention_out_bias": True}),
    "arcee": ("Arcee", "Arcee", {"rope_parameters": ROPE, "attention_bias": True}),
    "gpt_oss": ("GptOss", "GptOss", {**WINDOWS, "rope_parameters": {**YARN, "truncate": False}, "num_local_experts": 4,
                                     "num_experts_per_tok": 2, "swiglu_limit": 1.5}),
    "granitemoe": ("GraniteMoe", "GraniteMoe", {"embedding_multiplier": 3.0, "residual_multiplier": 0.22,
                                               "rope_parameters": ROPE, "attention_multiplier": 0.3, "logits_scaling": 2.5,
                                               "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": ...}),
    "ernie4_5": ("Ernie4_5", "Ernie4_5", {"rope_parameters": ROPE, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", "Olmoe", {"rope_parameters": ROPE, "head_dim": ..., "num_experts": 6, "num_experts_per_tok": 3,
                                 "intermediate_size": 12}),
    "qwen2_moe": ("Qwen2Moe", "Qwen2Moe", {"rope_parameters": ROPE, "head_dim": ..., "num_experts": 6,
                                           "num_experts_per_tok": 3, "moe_intermediate_size": 12, "mlp_only_layers": [1],
                                           "shared_expert_intermediate_size": 20}),
    "qwen3_next": ("Qwen3Next", "Qwen3Next", {**LINEAR_LAYERS, "num_experts": 4, "num_experts_per_tok": 2,
                                             "mlp_only_layers": [1], "moe_intermediate_size": 12,
                                             "shared_expert_intermediate_size": 20}),
    "qwen3_5_text": ("Qwen3_5", "Qwen3_5Text", {**LINEAR_LAYERS, "tie_word_embeddings": True}),
    "deepseek_v2": ("DeepseekV2", "DeepseekV2", {**LATENT, **MSCALES, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v2_groups": ("DeepseekV2", "DeepseekV2", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("DeepseekV3", "DeepseekV3", {**LATENT, **MSCALES}),
    "deepseek_v3_halves": ("DeepseekV3", "DeepseekV3", {**LATENT, "q_lora_rank": None, "rope_interleave": False,
                                                       "first_k_dense_replace": 3}),
    "kimi_k2": ("DeepseekV3", "DeepseekV3", {**LATENT, "n_group": 1, "topk_group": 1}),
    "glm4_moe": ("Glm4Moe", "Glm4Moe", {**ROUTED, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_plain": ("Glm4Moe", "Glm4Moe", {**ROUTED, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    "minimax_m2": ("MiniMaxM2", "MiniMaxM2", {"num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 4,
                                              "intermediate_size": 12, "rope_parameters": ROPE}),
    "glm4_moe_lite": ("Glm4MoeLite", "Glm4MoeLite", {**LATENT, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
                                                    "mlp_layer_types": ["dense", "sparse", "dense"]}),
}  # fmt: skip


def weights(shapes: dict[str, list[int]], seed: int = SEED) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, float32: normal numbers around 0, and around 1 for norms."""
    made = {}
    for name, shape in sorted(shapes.items()):
        rng = np.random.RandomState((seed + zlib.crc32(name.encode())) % 2**32)
        made[name] = np.asarray(rng.normal(0, 0.2 if "norm" in name else 0.35, shape) + ("norm" in name), np.float32)
    return made


def build(name: str, seed: int):
    """The PyTorch model, and the names and shapes of its checkpoint's tensors."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    prefix, of_config, changes = MODELS[name]
    config = getattr(transformers, f"{of_config}Config")(**{key: x for key, x in {**TINY, **changes}.items() if x is not ...})
    of_model = getattr(transformers, f"{prefix}ForCausalLM")
    with tempfile.TemporaryDirectory() as directory:
        of_model(config).save_pretrained(directory)
        path = Path(directory, "model.safetensors")
        shapes = {key: list(value.shape) for key, value in load_file(path).items()}
        save_file({key: torch.from_numpy(value) for key, value in weights(shapes, seed).items()}, path, {"format": "pt"})
        # Read from the file, because tensors of a module may be made from several tensors of a file.
        model, found = of_model.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
    problems = {key: value for key, value in found.items() if value and key != "error_msgs"}
    assert not problems, problems
    model.eval()
    return model, shapes


def one_pass(model, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The residual stream after each layer [L, T, d], and the logits [T, V], of one row."""
    import torch

    hidden = []
    hooks = [
        layer.register_forward_hook(lambda module, given, out: hidden.append(out[0] if isinstance(out, tuple) else out))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens[None]), use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return torch.stack(hidden)[:, 0].numpy(), logits[0].numpy()


def decode(model, tokens: np.ndarray, prompt: int) -> np.ndarray:
    """The logits [STEPS, V] after the prompt of a row, and after each of the next tokens."""
    import torch
    import transformers

    ids, logits = torch.from_numpy(tokens[None]), []
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + STEPS - 1))]:
            # All that are cached are earlier: the position is not left to a default, which changed between versions.
            out = model(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True)
            logits.append(out.logits[0, -1])
    return torch.stack(logits).numpy()


def golden(name: str, seed: int = SEED) -> dict[str, np.ndarray]:
    """Everything one file holds."""
    model, shapes = build(name, seed)
    tokens = np.random.RandomState(seed).randint(0, TINY["vocab_size"], (len(PROMPTS), LENGTH))
    hidden, logits = one_pass(model, tokens[0])
    decoded = [decode(build(name, seed)[0], row, prompt) for row, prompt in zip(tokens, PROMPTS, strict=True)]
    config = json.loads(model.config.to_json_string())
    config |= {"model_type": RENAMED[name]} if name in RENAMED else {}
    return {
        "config": np.array(json.dumps(config, indent=2, sort_keys=True)),
        "shapes": np.array(json.dumps(shapes)),
        "tokens": tokens,
        "prompts": np.array(PROMPTS),
        "hidden": hidden[:, -4:],
        "logits": logits,
        "decoded": np.stack(decoded),
    }


def main() -> None:
    """Write every model's file beside this script, or those of the models that are named."""
    import transformers

    for name in sys.argv[1:] or MODELS:
        path = HERE / f"{name}.npz"
        made = golden(name)
        np.savez_compressed(path, **made)
        largest = np.abs(made["logits"]).max()
        size = path.stat().st_size / 1000
        print(f"{path.name}: {size:.0f} KB, logits to {largest:.1f}, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
