"""Golden outputs of the ``transformers`` PyTorch classes on tiny random models, one ``.npz`` for each family.

Run with torch and transformers installed::

    python -m experiments.lab.goldens [FAMILY ...]

Each file holds ``config`` (the JSON text that transformers writes), ``tokens`` int64 [B, T], ``hidden``
float32 [L, B, T, d] (the residual stream after each layer), ``logits`` float32 [B, T, V], and every tensor of
the checkpoint under ``weight:<name>``. Weights lie on the float16 grid and are stored so, which
halves the files at no loss. Where RoPE changes with the length of the text, ``decoded`` float32 [B, T - P, V] are the
logits after a prompt of P = `PROMPT` tokens, when the other tokens come one at a time and keys are cached.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from tests.goldens import FOLDER

HERE = FOLDER / "models"
SEED = 20261121
BATCH, LENGTH = 2, 24
PROMPT = 12  # fewer tokens than the old context of families whose frequencies change
TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "bos_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
# With an original context of 16 tokens, head_dim 16 has kept, interpolated and fully scaled frequencies.
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
FAMILIES = {  # name -> (class prefix in transformers, what differs from TINY)
    "llama": ("Llama", {"rms_norm_eps": 1e-5, "eos_token_id": 3}),
    "llama3_rope_tied": (
        "Llama",
        {
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-3,
            "eos_token_id": [3, 5],
        },
    ),
    "qwen2_bias": ("Qwen2", {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3_qk_norm": ("Qwen3", {"num_key_value_heads": 1, "eos_token_id": 7}),
    "qwen3_tied": (
        "Qwen3",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "mistral": (
        "Mistral",
        {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
    ),
    "yi": ("Llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "qwen2_windows": (
        "Qwen2",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3_yarn": (
        "Qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "beta_fast": 4.0,
            },
        },
    ),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "llama_dynamic": (
        "Llama",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0},
        },
    ),
    "llama_longrope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 16, "factor": 8.0,
                "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
                "long_factor": [1.0, 1.2, 1.7, 2.5, 4.0, 5.0, 6.0, 8.0],
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "norm_topk_prob": True, "mlp_only_layers": [1],
        },
    ),
    "qwen3_moe_tied": (
        "Qwen3Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": False,
            "decoder_sparse_step": 2, "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 2}),
}  # fmt: skip


def build(name: str, seed: int) -> torch.nn.Module:
    """The PyTorch model of a family, every parameter (norms and biases too) random on the float16 grid."""
    prefix, overrides = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**TINY, **overrides})
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in sorted(model.named_parameters()):
            noise = torch.randn(value.shape, generator=generator)
            value.copy_((1 + 0.2 * noise if "norm" in key else 0.25 * noise).half().float())
    return model


def trace(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """Random tokens, the residual stream after each layer, and the logits."""
    hidden = []

    def keep(module, inputs, output):
        hidden.append(output[0] if isinstance(output, tuple) else output)

    hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
    tokens = torch.randint(0, TINY["vocab_size"], (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return {"tokens": tokens.numpy(), "hidden": torch.stack(hidden).numpy(), "logits": logits.numpy()}


def decode(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """The logits after each of the tokens behind the prompt, which are read one at a time."""
    ids, logits = torch.from_numpy(tokens), []
    with torch.no_grad():
        out = model(input_ids=ids[:, :PROMPT], use_cache=True)
        for at in range(PROMPT, LENGTH):
            out = model(input_ids=ids[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1).numpy()


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors that transformers writes to a checkpoint; tied weights appear once, fused experts one by one."""
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_file(Path(directory, "model.safetensors"))


def golden(name: str, seed: int) -> dict[str, np.ndarray]:
    """Everything one file holds."""
    model = build(name, seed)
    weights = {f"weight:{key}": value.numpy().astype(np.float16) for key, value in tensors(model).items()}
    traced = trace(model, seed + 1)
    if name in ("llama_dynamic", "llama_longrope"):
        # A new model: dynamic RoPE remembers the longest text that it has read.
        traced["decoded"] = decode(build(name, seed), traced["tokens"])
    return {"config": np.array(model.config.to_json_string()), **traced, **weights}


def main() -> None:
    """Write every family's file, or those of the families that are named."""
    for index, name in enumerate(FAMILIES):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        path = HERE / f"{name}.npz"
        np.savez_compressed(path, **golden(name, SEED + 10 * index))
        print(f"{path.name}: {path.stat().st_size / 1000:.0f} KB, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
