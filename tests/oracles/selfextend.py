"""SelfExtend: true distances nearby, and distances between groups far away, under one softmax."""

import numpy as np

from tests.oracles.plain import Trace, rotate, rotate_all, softmax

KNOBS = {"group_size": 4, "window": 8}
LENGTHS = (1, 7, 8, 9, 17, 40)


def run(q, k, v, prompt, inv_freq, group_size, window):
    """See the package's docstring."""
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    near_q, near_k = rotate_all(q, inv_freq), rotate_all(k, inv_freq)
    far_q, far_k = np.zeros(q.shape), np.zeros(k.shape)
    for h, i in np.ndindex(heads, total):
        far_k[h, i] = rotate(k[h, i], i // group_size, inv_freq)
        for g in range(group):
            far_q[h, g, i] = rotate(q[h, g, i], i // group_size + window - window // group_size, inv_freq)
    for i in range(total):
        out = np.zeros((heads, group, dim))
        for h in range(heads):
            for g in range(group):
                logits = []
                for j in range(i + 1):
                    query, key = (near_q, near_k) if i - j < window else (far_q, far_k)
                    logits.append(query[h, g, i] @ key[h, j] / np.sqrt(dim))
                for j, weight in enumerate(softmax(logits)):
                    out[h, g] += weight * np.asarray(v[h, j], np.float64)
        trace.add(i, out, [set(range(i + 1))] * heads)
    return trace
