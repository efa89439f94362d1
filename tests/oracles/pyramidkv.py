"""PyramidKV: SnapKV with a budget that falls from layer to layer; here it is the first layer of two."""

from fractions import Fraction
from math import floor

import numpy as np

from tests.oracles.plain import keep_once, rotate_all
from tests.oracles.snapkv import keep

KNOBS = {"budget": 10, "obs_window": 5, "kernel": 3, "beta": 4}
LENGTHS = (1, 5, 6, 12, 13, 14, 40)


def budget_of(layer, layers, budget, obs_window, beta):
    """Tokens that a layer keeps."""
    low = Fraction(budget - obs_window, beta)
    high = 2 * (budget - obs_window) - low
    return obs_window + floor(high - layer * (high - low) / (layers - 1))


def run(q, k, v, prompt, inv_freq, budget, obs_window, kernel, beta):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    size = budget_of(0, 2, budget, obs_window, beta)
    return keep_once(q, k, v, prompt, [keep(q, k, h, prompt, size, obs_window, kernel) for h in range(len(k))])
