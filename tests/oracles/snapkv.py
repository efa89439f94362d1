"""SnapKV: votes of the last W queries, pooled, once after the prompt; one set per KV head (mean over the group)."""

import numpy as np

from tests.oracles.plain import best, keep_once, rotate_all, softmax

KNOBS = {"budget": 12, "obs_window": 5, "kernel": 3}
LENGTHS = (1, 4, 5, 6, 11, 12, 13, 40)


def votes(q, k, h, prompt, obs_window, kernel):
    """The score of each prompt position before the window for KV head ``h``, from rotated q and k."""
    group, dim = q.shape[1], q.shape[3]
    prefix = max(prompt - obs_window, 0)
    mean = np.zeros(prefix)
    for g in range(group):
        received = np.zeros(prefix)
        for t in range(prefix, prompt):
            weight = softmax([float(q[h, g, t] @ k[h, i]) / np.sqrt(dim) for i in range(t + 1)])
            for i in range(prefix):
                received[i] += weight[i]
        for i in range(prefix):
            around = [received[j] for j in range(i - kernel // 2, i + kernel // 2 + 1) if 0 <= j < prefix]
            mean[i] += sum(around) / kernel / group
    return mean


def keep(q, k, h, prompt, budget, obs_window, kernel):
    """Prompt positions that KV head ``h`` keeps, from rotated q and k."""
    if prompt <= budget:
        return set(range(prompt))
    score = votes(q, k, h, prompt, obs_window, kernel)
    return best(dict(enumerate(score)), budget - obs_window) | set(range(len(score), prompt))


def run(q, k, v, prompt, inv_freq, budget, obs_window, kernel):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    return keep_once(q, k, v, prompt, [keep(q, k, h, prompt, budget, obs_window, kernel) for h in range(len(k))])
