"""Knorm: the tokens with the shortest keys stay, once after the prompt."""

import numpy as np

from tests.oracles.plain import best, keep_once, rotate_all

KNOBS = {"budget": 12}
LENGTHS = (1, 11, 12, 13, 40)


def run(q, k, v, prompt, inv_freq, budget):
    """See the package's docstring."""
    kept = [best({i: -float(np.sum(np.square(head[i], dtype=np.float64))) for i in range(prompt)}, budget) for head in k]
    return keep_once(rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64), prompt, kept)
