"""GGUF files of the families of `models.files.tables.families`: their metadata as keys of ``config.json``.

A file does not say all that ``config.json`` says. What llama.cpp knows of an architecture without being told is here, too.

Sources: llama.cpp's ``convert_hf_to_gguf.py``, which writes the files, and ``llama-model.cpp``, which reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import qwen3next
from .reader import GGUFFile

FACTORS_LONG, FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_GEMMA_27B = 62  # its layers: it divides attention by the square root of hidden_size / heads
Number = Callable[[str], Any]  # reads a number or a bool of the file by its key behind the architecture's name


def _gemma3(file: GGUFFile, number: Number, sizes: Mapping[str, Any]) -> dict[str, Any]:
    factor = number("rope.scaling.factor")
    wide = sizes["num_hidden_layers"] == _GEMMA_27B
    return {
        "model_type": "gemma3_text",
        "sliding_window": number("attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": number("rope.freq_base_swa") or 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": factor} if factor else None,
        "query_pre_attn_scalar": sizes["hidden_size"] // sizes["num_attention_heads"] if wide else sizes["head_dim"],
        "final_logit_softcapping": number("final_logit_softcapping") or None,
    }


def _gpt_oss(file: GGUFFile, number: Number, sizes: Mapping[str, Any]) -> dict[str, Any]:
    yarn = {
        "rope_type": "yarn", "factor": number("rope.scaling.factor"), "truncate": False,
        "original_max_position_embeddings": number("rope.scaling.original_context_length"),
        "beta_fast": number("rope.scaling.yarn_beta_fast"), "beta_slow": number("rope.scaling.yarn_beta_slow"),
    }  # fmt: skip
    return {
        "model_type": "gpt_oss",
        "sliding_window": number("attention.sliding_window"),
        "num_local_experts": number("expert_count"),
        "num_experts_per_tok": number("expert_used_count"),
        "intermediate_size": number("expert_feed_forward_length"),
        "rope_scaling": {key: value for key, value in yarn.items() if value is not None} if yarn["factor"] else None,
        "attention_bias": True,
    }


def _phi3(file: GGUFFile, number: Number, sizes: Mapping[str, Any]) -> dict[str, Any]:
    old = number("rope.scaling.original_context_length")
    rotated = number("rope.dimension_count") or sizes["head_dim"]
    rule: dict[str, Any] = {}
    if FACTORS_LONG in file.tensors and FACTORS_SHORT in file.tensors:
        for key, name in (("long_factor", FACTORS_LONG), ("short_factor", FACTORS_SHORT)):
            rule[key] = [_shortest(x) for x in file.read(name, np.dtype(np.float32))]
        rule["rope_type"] = "longrope"
    return {
        "model_type": "phi3",
        "sliding_window": number("attention.sliding_window") or None,
        "original_max_position_embeddings": old or sizes["max_position_embeddings"],
        "partial_rotary_factor": rotated / sizes["head_dim"],
        "rope_scaling": rule or None,
    }


# Architecture -> what makes the keys beside sizes, and the keys that it reads and that other architectures refuse.
_READERS: dict[str, tuple[Callable[..., dict[str, Any]], tuple[str, ...]]] = {
    "gemma3": (_gemma3, ("rope.scaling.type", "rope.scaling.factor", "final_logit_softcapping",
                         "attention.sliding_window_pattern")),
    "gpt-oss": (_gpt_oss, ("expert_count", "rope.scaling.type", "rope.scaling.factor")),
    "phi3": (_phi3, ("rope.scaling.type", "rope.scaling.attn_factor")),
    qwen3next.ARCHITECTURE: (qwen3next.declared, qwen3next.KEYS),
}  # fmt: skip
ARCHITECTURES = tuple(_READERS)
_SCALING = {"gemma3": ("none", "linear"), "gpt-oss": ("none", "yarn"), "phi3": ("none", "longrope"),
            qwen3next.ARCHITECTURE: ("none",)}  # fmt: skip


def keys_read(arch: str) -> tuple[str, ...]:
    """List the keys behind the architecture's name that `declared` reads, of those that can change the arithmetic."""
    return _READERS[arch][1] if arch in _READERS else ()


def declared(file: GGUFFile, arch: str, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Write a file's metadata as a ``config.json``.

    Args:
        file: the open file.
        arch: one of `ARCHITECTURES`.
        sizes: the sizes and the numbers that files of all architectures have, by keys of ``config.json``.

    Raises:
        ValueError: a value has the wrong type, or the file asks for something that no model of the architecture has.
    """
    read, _ = _READERS[arch]

    def number(key: str) -> Any:
        value = file.metadata.get(f"{arch}.{key}")
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{arch}.{key} must be a number, got {value!r:.60}")
        return _shortest(value) if type(value) is float else value

    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in _SCALING[arch]:
        raise ValueError(f"unsupported {arch}.rope.scaling.type={kind!r:.60}, expected {' or '.join(_SCALING[arch])}")
    pattern = file.metadata.get(f"{arch}.attention.sliding_window_pattern", 6)
    if arch == "gemma3" and pattern != 6:
        raise ValueError(f"unsupported {arch}.attention.sliding_window_pattern={pattern!r:.60}, expected 6")
    made = {**sizes, **read(file, number, sizes)}
    return {key: value for key, value in made.items() if value is not None or key in ("rope_scaling", "sliding_window")}


def _shortest(value: float | np.floating) -> float:
    """Return a float32 as the shortest decimal that rounds to it."""
    return float(str(np.float32(value)))


def check_factor(file: GGUFFile, config: Any) -> None:
    """Refuse a file of Phi-3 whose factor on attention is another than its context says.

    Raises:
        ValueError: the message has both numbers.
    """
    factor, rule = file.metadata.get("phi3.rope.scaling.attn_factor"), config.rope_scaling
    if factor is None or rule is None or rule.rope_type != "longrope":
        return
    old = math.log(rule.original_max_position_embeddings)
    expected = 1.0 if rule.factor <= 1 else math.sqrt(1 + math.log(rule.factor) / old)
    if not math.isclose(factor, expected, rel_tol=1e-4):
        raise ValueError(f"unsupported phi3.rope.scaling.attn_factor={factor}, expected {expected:.6f}")
