"""Which architectures of GGUF files load, and what the metadata of each says, as keys of ``config.json``.

A file does not say all that ``config.json`` says. What llama.cpp knows of an architecture without being told is here, too.

Sources: llama.cpp's ``convert_hf_to_gguf.py``, which writes the files, and ``llama-model.cpp``, which reads them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pallas_kernels.machine import say_once

from ...sizes.rope_scaling import RopeScaling
from ..hf import rope as hf_rope
from .reader import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"
FACTORS_LONG, FACTORS_SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_LLAMA31 = (1.0, 4.0, 8192)  # low_freq_factor, high_freq_factor and old context of Llama 3.1, 3.2 and 3.3
_TOLERANCE = 1e-5  # relative; the file holds float32
PREDICTING = "nextn_predict_layers"  # the last layers, which only predict tokens after the next
_GEMMA_27B = 62  # its layers: it divides attention by the square root of hidden_size / heads
_COUNTS = {  # of Qwen3-Next: key after the architecture's name -> key of config.json
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_INNER, _ROTATED, _INTERVAL = "ssm.inner_size", "rope.dimension_count", "full_attention_interval"
Number = Callable[[str], Any]  # reads a number or a bool of the file by its key behind the architecture's name
Declared = Callable[[GGUFFile, Number, Mapping[str, Any]], dict[str, Any]]  # of a file: keys of config.json beside sizes


def _plain(file: GGUFFile, number: Number, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Describe Llama, Mistral, Yi, SmolLM2, Qwen 2 or Qwen 3; llama.cpp writes Mistral, Yi and SmolLM2 as llama."""
    arch = file.metadata["general.architecture"]
    window, rule = number("attention.sliding_window") or 0, None
    if 0 < window < sizes["max_position_embeddings"] and arch != "llama":
        raise ValueError(
            f"unsupported sliding window of {window} tokens in a file of architecture {arch!r}, which does not say which "
            "layers have it: convert the model from its Hugging Face directory"
        )
    title = file.metadata.get("general.name")
    if arch == "llama" and not window and "mistral" in str(title).lower():  # converters to GGUF leave the window out
        say_once(
            f"{file.path} calls itself {title!r} and has no sliding window: if its Hugging Face folder has one in "
            "config.json (Mistral 7B v0.1: 4096 tokens), logits differ beyond it"
        )
    if ROPE_FACTORS in file.tensors:
        factors = file.read(ROPE_FACTORS, np.dtype(np.float64))
        rule = scaling_from_factors(factors, sizes["head_dim"], sizes["rope_theta"])
    return {
        "model_type": "mistral" if window > 0 and arch == "llama" else arch,  # every layer of Mistral has its window
        "sliding_window": window if window > 0 else None,
        "rope_scaling": None if rule is None else hf_rope.write(rule),
    }


def scaling_from_factors(factors: np.ndarray, head_dim: int, theta: float) -> RopeScaling | None:
    """Infer the llama3 rule that divides RoPE's frequencies by ``factors``; return None if all factors are one.

    The file stores the rule's effect on each frequency instead of its parameters. With turns t of a frequency in the
    old context, low and high factors l and h, and the stretch f, the rule gives ``1 / factor = s + (1 - s) / f`` with
    ``s = (t - l) / (h - l)`` clipped to [0, 1]. Scaling l, h and the old context together has no effect. So the rule is
    inferred with l = 1, the value of Llama's own settings.

    Args:
        factors: [D/2], from the tensor ``rope_freqs.weight``.
        head_dim: D.
        theta: base of the frequencies.
    """
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"{ROPE_FACTORS} must have shape [{head_dim // 2}], got {list(factors.shape)}")
    if np.all(factors == 1):
        return None
    turns = theta ** (-2 * np.arange(head_dim // 2) / head_dim) / (2 * math.pi)  # in one token
    stretch = float(factors.max())
    for low, high, old in (_LLAMA31, *_fits(factors, turns, stretch)):
        keep = np.clip((turns * old - low) / (high - low), 0, 1)
        if np.allclose(1 / factors, keep + (1 - keep) / stretch, rtol=_TOLERANCE, atol=0):
            return RopeScaling(
                factor=float(f"{stretch:.6g}"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=old,
            )
    raise ValueError(
        "unsupported rope_freqs.weight: expected factors of the llama3 rule, got factors that no llama3 rule gives"
    )


def _fits(factors: np.ndarray, turns: np.ndarray, stretch: float) -> list[tuple[float, float, int]]:
    """Fit the rule to the interpolated frequencies; return no rule if fewer than two frequencies are interpolated."""
    between = (factors > 1 + _TOLERANCE) & (factors < stretch * (1 - _TOLERANCE))
    if stretch <= 1 or between.sum() < 2:
        return []
    kept = (1 / factors[between] - 1 / stretch) / (1 - 1 / stretch)
    slope, offset = np.polyfit(turns[between], kept, 1)  # old / (high - low), and -low / (high - low)
    if slope <= 0 or offset >= 0:
        return []
    high = round(float(1 - 1 / offset), 3)
    return [(1.0, high, round(slope * (high - 1)))]


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
    old = number("rope.scaling.original_context_length") or sizes["max_position_embeddings"]
    rotated = number("rope.dimension_count") or sizes["head_dim"]
    rule: dict[str, Any] = {}
    if FACTORS_LONG in file.tensors and FACTORS_SHORT in file.tensors:
        for key, name in (("long_factor", FACTORS_LONG), ("short_factor", FACTORS_SHORT)):
            rule[key] = [shortest(x) for x in file.read(name, np.dtype(np.float32))]
        rule["rope_type"] = "longrope"
        stretch, factor = sizes["max_position_embeddings"] / old, number("rope.scaling.attn_factor")
        expected = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(old))
        if factor is not None and not math.isclose(factor, expected, rel_tol=1e-4):
            raise ValueError(f"unsupported phi3.rope.scaling.attn_factor={factor}, expected {expected:.6f}")
    return {
        "model_type": "phi3",
        "sliding_window": number("attention.sliding_window") or None,
        "original_max_position_embeddings": old,
        "partial_rotary_factor": rotated / sizes["head_dim"],
        "rope_scaling": rule or None,
    }


def _qwen3next(file: GGUFFile, number: Number, sizes: Mapping[str, Any]) -> dict[str, Any]:
    every = 4 if number(_INTERVAL) is None else number(_INTERVAL)  # llama.cpp's default
    needed = {key: number(key) for key in (*_COUNTS, _INNER, _ROTATED)}
    if absent := [f"qwen3next.{key}" for key, value in needed.items() if value is None]:
        raise ValueError(f"the file lacks {', '.join(absent)}")
    for key, value in {**needed, _INTERVAL: every}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"qwen3next.{key} must be a positive whole number, got {value!r:.60}")
    inner, heads = needed[_INNER], needed["ssm.time_step_rank"]
    if inner % heads:
        raise ValueError(f"qwen3next.{_INNER} must be a multiple of qwen3next.ssm.time_step_rank, got {inner} and {heads}")
    return {
        "model_type": "qwen3_next",
        **{key: needed[ours] for ours, key in _COUNTS.items()},
        "linear_value_head_dim": inner // heads,
        "full_attention_interval": every,
        "partial_rotary_factor": needed[_ROTATED] / sizes["head_dim"],
        "norm_topk_prob": True,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFFamily:
    """What a file of one architecture says, and what it may say beside what files of every architecture may."""

    declared: Declared
    keys: tuple[str, ...] = ()  # that can change the arithmetic, and that `declared` reads
    neutral: Mapping[str, tuple] = dataclasses.field(default_factory=dict)  # other such keys -> values that change nothing
    scaling: tuple[str, ...] = ("none",)  # kinds of stretched RoPE
    partial: bool = False  # a part of each head may rotate


FAMILIES = {
    **dict.fromkeys(("llama", "qwen2", "qwen3"), GGUFFamily(declared=_plain)),
    "gemma3": GGUFFamily(
        declared=_gemma3, keys=("rope.scaling.factor", "final_logit_softcapping"), scaling=("none", "linear"),
        neutral={"attention.sliding_window_pattern": (6,)},
    ),
    "gpt-oss": GGUFFamily(declared=_gpt_oss, keys=("expert_count", "rope.scaling.factor"), scaling=("none", "yarn")),
    "phi3": GGUFFamily(declared=_phi3, keys=("rope.scaling.attn_factor",), scaling=("none", "longrope"), partial=True),
    "qwen3next": GGUFFamily(
        declared=_qwen3next, keys=("expert_count", PREDICTING), partial=True,
        neutral={  # what llama.cpp does whatever the file says, or what only other models have
            "expert_weights_norm": (True,), "expert_weights_scale": (0.0, 1.0), "expert_gating_func": (1,),
            "expert_group_count": (0, 1), "attention.recurrent_layers": (),
        },
    ),
}  # fmt: skip


def shortest(value: float | np.floating) -> float:
    """Return a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
