"""H2O: accumulated attention per KV head, the heaviest and the newest tokens stay, one eviction per decoded token."""

import numpy as np

from tests.oracles.plain import Trace, attend, best, rotate_all

KNOBS = {"budget": 12, "num_recent": 4}
LENGTHS = (1, 3, 4, 5, 11, 12, 13, 40)


def run(q, k, v, prompt, inv_freq, budget, num_recent):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    mass: list[dict[int, float]] = [{} for _ in range(heads)]
    for t in range(total):
        out = np.zeros((heads, group, dim))
        attended = []
        for h in range(heads):
            mass[h][t] = 0.0
            tokens = sorted(mass[h])
            attended.append(set(tokens))
            for g in range(group):
                out[h, g], weight = attend(q[h, g, t], [k[h, i] for i in tokens], [v[h, i] for i in tokens])
                for token, probability in zip(tokens, weight, strict=True):
                    mass[h][token] += probability
            if t >= prompt - 1 and len(tokens) > budget:  # the prompt itself is dense
                old = {i: mass[h][i] for i in tokens if i <= t - num_recent}
                heavy = best(old, budget - num_recent)
                mass[h] = {i: a for i, a in mass[h].items() if i in heavy or i > t - num_recent}
        trace.add(t, out, attended, [set(m) for m in mass])
    return trace
