"""Full: causal softmax attention over everything."""

import numpy as np

from tests.oracles.plain import keep_all, rotate_all

KNOBS: dict = {}
LENGTHS = (1, 2, 15, 16, 17, 40)


def run(q, k, v, prompt, inv_freq):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    return keep_all(q, k, v, prompt, lambda t: [set(range(t + 1)) for _ in k])
