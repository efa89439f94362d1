"""NTK: Full attention with another base of RoPE."""

import numpy as np

from tests.oracles import full

KNOBS = {"factor": 5.0}
LENGTHS = full.LENGTHS


def run(q, k, v, prompt, inv_freq, factor):
    """See the package's docstring."""
    pairs = len(inv_freq)
    dim = 2 * pairs
    if not inv_freq[1]:  # nothing is rotated
        return full.run(q, k, v, prompt, inv_freq)
    base = float(inv_freq[1]) ** (-dim / 2)  # the second frequency is base^(-2 / D)
    stretched = base * factor ** (dim / (dim - 2))
    return full.run(q, k, v, prompt, np.array([stretched ** (-2 * i / dim) for i in range(pairs)]))
