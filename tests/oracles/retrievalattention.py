"""RetrievalAttention: the keys of the prompt that each query head likes best, both ends of the prompt, what was generated."""

import numpy as np

from tests.oracles.plain import Trace, attend, best, dense_prompt, rotate_all

KNOBS = {"budget": 6, "num_sink": 2, "num_local": 5, "buffer": 4}
LENGTHS = (1, 2, 3, 7, 8, 9, 13, 40)
DIGITS = 9  # scores are compared after rounding: equal in exact arithmetic must be equal here


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_local, buffer):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, total):
        zone = list(range(num_sink, max(prompt - num_local, t + 1 - num_local - buffer)))
        chosen, out = [], np.zeros((heads, group, dim))
        for h in range(heads):
            union = set(range(t + 1)) - set(zone)
            for g in range(group):
                logits = {i: round(float(q[h, g, t] @ k[h, i]) / np.sqrt(dim), DIGITS) for i in zone}
                own = sorted(best(logits, budget) | set(range(t + 1)) - set(zone))
                out[h, g], _ = attend(q[h, g, t], [k[h, i] for i in own], [v[h, i] for i in own])
                union |= set(own)
            chosen.append(union)
        trace.add(t, out, chosen)
    return trace
