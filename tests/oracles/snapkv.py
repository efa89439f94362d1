"""SnapKV: votes of the last W queries, pooled, once after the prompt; one set per KV head (mean over the group)."""

from __future__ import annotations

import numpy as np

from tests.oracles.plain import Trace, attend_to, best, dense_prompt, rotate_all, softmax

KNOBS = {"budget": 12, "obs_window": 5, "kernel": 3, "pooling": "avg"}
LENGTHS = (1, 4, 5, 6, 11, 12, 13, 40)


def keep(q, k, h, prompt, budget, obs_window, kernel, pooling):
    """Prompt positions that KV head ``h`` keeps, from rotated q and k."""
    if prompt <= budget:
        return set(range(prompt))
    group, dim = q.shape[1], q.shape[3]
    prefix = prompt - obs_window
    pooled_mean = np.zeros(prefix)
    for g in range(group):
        votes = np.zeros(prefix)
        for t in range(prefix, prompt):
            weight = softmax([float(q[h, g, t] @ k[h, i]) / np.sqrt(dim) for i in range(t + 1)])
            for i in range(prefix):
                votes[i] += weight[i]
        for i in range(prefix):
            around = [votes[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < prefix]
            pooled_mean[i] += (sum(around) / kernel if pooling == "avg" else max(around)) / group
    chosen = best(dict(enumerate(pooled_mean)), budget - obs_window)
    return chosen | set(range(prefix, prompt))


def run(q, k, v, prompt, inv_freq, budget, obs_window, kernel, pooling):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    kept = [keep(q, k, h, prompt, budget, obs_window, kernel, pooling) for h in range(len(k))]
    for t in range(prompt, k.shape[1]):
        kept = [positions | {t} for positions in kept]
        trace.outputs.append(attend_to(q, k, v, t, [sorted(positions) for positions in kept]))
        trace.attended.append(kept)
        trace.kept.append(kept)
    return trace
