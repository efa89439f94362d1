"""SelfExtend: every pair of a query and a key is rotated for itself, by its distance."""

from __future__ import annotations

import numpy as np

from tests.oracles.plain import Trace, rotate, softmax

KNOBS = {"group_size": 4, "window": 8}
LENGTHS = (1, 7, 8, 9, 17, 40)


def run(q, k, v, prompt, inv_freq, group_size, window):
    """See the package's docstring."""
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    for i in range(total):
        out = np.zeros((heads, group, dim))
        for h in range(heads):
            for g in range(group):
                logits = []
                for j in range(i + 1):
                    at, place = i, j
                    if i - j >= window:
                        at, place = i // group_size + window - window // group_size, j // group_size
                    logits.append(rotate(q[h, g, i], at, inv_freq) @ rotate(k[h, j], place, inv_freq) / np.sqrt(dim))
                for j, weight in enumerate(softmax(logits)):
                    out[h, g] += weight * np.asarray(v[h, j], np.float64)
        if i < prompt:
            trace.prompt[:, :, i] = out
        else:
            trace.outputs.append(out)
            trace.attended.append([set(range(i + 1))] * heads)
            trace.kept.append([set(range(i + 1))] * heads)
    return trace
