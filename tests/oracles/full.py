"""Full: causal softmax attention over everything."""

from __future__ import annotations

import numpy as np

from tests.oracles.plain import Trace, attend_to, dense_prompt, rotate_all

KNOBS: dict = {}
LENGTHS = (1, 2, 15, 16, 17, 40)


def run(q, k, v, prompt, inv_freq):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads = range(len(k))
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, k.shape[1]):
        trace.outputs.append(attend_to(q, k, v, t, [list(range(t + 1)) for _ in heads]))
        trace.attended.append([set(range(t + 1)) for _ in heads])
        trace.kept.append([set(range(t + 1)) for _ in heads])
    return trace
