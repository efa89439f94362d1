"""ThinK: of the prompt's keys but the last, only the channels that the last queries and the keys are large in."""

import numpy as np

from tests.oracles.plain import best, keep_all, rotate_all

KNOBS = {"channels": 0.6, "obs_window": 5, "num_recent": 6}
LENGTHS = (1, 4, 5, 6, 7, 12, 23, 40)


def run(q, k, v, prompt, inv_freq, channels, obs_window, num_recent):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, _, dim = q.shape
    dropped = int(dim * (1 - channels) + 1e-6)
    thin = k.copy()
    for h in range(heads):
        score = {}
        for c in range(dim):
            asked = np.mean([q[h, g, t, c] ** 2 for g in range(group) for t in range(max(prompt - obs_window, 0), prompt)])
            score[c] = asked * np.mean([k[h, t, c] ** 2 for t in range(prompt)])
        for c in set(range(dim)) - best(score, dim - dropped):
            thin[h, : max(prompt - num_recent, 0), c] = 0
    return keep_all(q, k, v, prompt, lambda t: [set(range(t + 1)) for _ in k], keys=thin)
