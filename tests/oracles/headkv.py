"""HeadKV: SnapKV with a budget for each head of the model, by scores of the heads; here it is the first layer of two."""

from math import floor

import numpy as np

from tests.oracles.plain import keep_once, rotate_all
from tests.oracles.snapkv import keep

KNOBS = {
    "budget": 12, "obs_window": 5, "kernel": 3, "beta": 1.25, "scores": ((1.0, 4.0), (2.0, 1.0)),
}  # fmt: skip
LENGTHS = (1, 5, 6, 9, 10, 17, 18, 40)  # the heads keep 9 and 17 tokens


def budget_of(layer, head, budget, obs_window, beta, scores):
    """Tokens that a head keeps."""
    total, heads = sum(map(sum, scores)), sum(map(len, scores))
    prefix = budget - obs_window
    pool = floor(prefix / beta + 1e-9)
    return obs_window + prefix - pool + round(scores[layer][head] / total * pool * heads)


def run(q, k, v, prompt, inv_freq, budget, obs_window, kernel, beta, scores):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    sizes = [budget_of(0, h, budget, obs_window, beta, scores) for h in range(len(k))]
    return keep_once(q, k, v, prompt, [keep(q, k, h, prompt, sizes[h], obs_window, kernel) for h in range(len(k))])
