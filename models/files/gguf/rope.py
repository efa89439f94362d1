"""The ``llama3`` rule of a GGUF file, which stores the rule's effect on each frequency instead of its parameters."""

from __future__ import annotations

import math

import numpy as np

from ...sizes.rope_scaling import RopeScaling

_LLAMA31 = (1.0, 4.0, 8192)  # low_freq_factor, high_freq_factor and old context of Llama 3.1, 3.2 and 3.3
_TOLERANCE = 1e-5  # relative; the file holds float32


def scaling_from_factors(factors: np.ndarray, head_dim: int, theta: float) -> RopeScaling | None:
    """Infer the llama3 rule that divides RoPE's frequencies by ``factors``; return None if all factors are one.

    With turns t of a frequency in the old context, low and high factors l and h, and the stretch f, the rule gives
    ``1 / factor = s + (1 - s) / f`` with ``s = (t - l) / (h - l)`` clipped to [0, 1]. Scaling l, h and the old context
    together has no effect. So the rule is inferred with l = 1, the value of Llama's own settings.

    Args:
        factors: [D/2], from the tensor ``rope_freqs.weight``.
        head_dim: D.
        theta: base of the frequencies.
    """
    if factors.shape != (head_dim // 2,):
        raise ValueError(f"rope_freqs.weight must have shape [{head_dim // 2}], got {list(factors.shape)}")
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
