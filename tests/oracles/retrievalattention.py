"""RetrievalAttention: the prompt's keys with most attention, both ends of the prompt, and what was generated."""

from __future__ import annotations

import numpy as np

from tests.oracles.plain import Trace, attend_to, best, dense_prompt, rotate_all, softmax

KNOBS = {"budget": 6, "num_sink": 2, "num_local": 5, "buffer": 4}
LENGTHS = (1, 2, 3, 7, 8, 9, 13, 40)
DIGITS = 9  # scores are compared after rounding: equal in exact arithmetic must be equal here


def group_scores(logits, zone):
    """By slot of the list ``zone``: the sum over query heads of the softmax of their logits [G][len(zone)]."""
    if not zone:
        return {}
    shares = np.sum([softmax(row) for row in logits], axis=0)
    return {i: round(float(np.log(share)), DIGITS) for i, share in zip(zone, shares, strict=True)}


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_local, buffer):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, total):
        zone = list(range(num_sink, max(prompt - num_local, t + 1 - num_local - buffer)))
        chosen = []
        for h in range(heads):
            logits = [[float(q[h, g, t] @ k[h, i]) / np.sqrt(dim) for i in zone] for g in range(group)]
            found = best(group_scores(logits, zone), budget)
            chosen.append(found | (set(range(t + 1)) - set(zone)))
        trace.outputs.append(attend_to(q, k, v, t, [sorted(c) for c in chosen]))
        trace.attended.append(chosen)
        trace.kept.append([set(range(t + 1)) for _ in range(heads)])
    return trace
