"""The ``llama3`` rule of a GGUF file, which stores its effect on each frequency instead of its numbers."""

from __future__ import annotations

import math

import numpy as np

from ..rope_scaling import RopeScaling

_LLAMA31 = (1.0, 4.0, 8192)  # low_freq_factor, high_freq_factor and old context of Llama 3.1, 3.2 and 3.3
_TOLERANCE = 1e-5  # relative; the file holds float32


def scaling_from_factors(factors: np.ndarray, head_dim: int, theta: float) -> RopeScaling | None:
    """The rule whose frequencies are those of RoPE divided by ``factors``; None if all are one.

    With turns t of a frequency in the old context, low and high factors l and h, and the stretch f, the rule gives
    ``1 / factor = s + (1 - s) / f`` with ``s = (t - l) / (h - l)`` cut to [0, 1]. The numbers l, h and the old context can be
    scaled together without any effect. So they are found with l = 1, which is what Llama's own settings have.

    Args:
        factors: [D/2], from the tensor ``rope_freqs.weight``.
        head_dim: D.
        theta: base of the frequencies.

    Raises:
        ValueError: the factors are of another size, or of another rule than llama3.
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
        "unsupported rope_freqs.weight: its factors are not those of the llama3 rule, the only one known here"
    )


def _fits(factors: np.ndarray, turns: np.ndarray, stretch: float) -> list[tuple[float, float, int]]:
    """The rule that goes through the interpolated frequencies; none if fewer than two are interpolated."""
    between = (factors > 1 + _TOLERANCE) & (factors < stretch * (1 - _TOLERANCE))
    if stretch <= 1 or between.sum() < 2:
        return []
    kept = (1 / factors[between] - 1 / stretch) / (1 - 1 / stretch)
    slope, offset = np.polyfit(turns[between], kept, 1)  # old / (high - low), and -low / (high - low)
    if slope <= 0 or offset >= 0:
        return []
    high = round(1 - 1 / offset, 3)
    return [(1.0, high, round(slope * (high - 1)))]
