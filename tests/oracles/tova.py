"""TOVA: the tokens the newest query attends to most stay, one set per layer; one eviction per decoded token."""

import numpy as np

from tests.oracles.plain import Trace, attend, best, rotate_all

KNOBS = {"budget": 12}
LENGTHS = (1, 3, 11, 12, 13, 40)


def run(q, k, v, prompt, inv_freq, budget):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    kept: list[int] = []
    for t in range(total):
        kept.append(t)
        attended = list(kept)
        out = np.zeros((heads, group, dim))
        score = dict.fromkeys(kept, 0.0)
        for h in range(heads):
            for g in range(group):
                out[h, g], weight = attend(q[h, g, t], [k[h, i] for i in kept], [v[h, i] for i in kept])
                for token, probability in zip(kept, weight, strict=True):
                    score[token] += probability
        if t >= prompt - 1 and len(kept) > budget:  # the prompt itself is dense
            kept = sorted(best(score, budget))
        trace.add(t, out, [set(attended)] * heads, [set(kept)] * heads)
    return trace
