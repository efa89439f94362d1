"""AdaKV: the best SnapKV scores of all heads of a layer stay, with a least and a largest number in each head."""

import numpy as np

from tests.oracles.plain import best, keep_once, rotate_all
from tests.oracles.snapkv import votes

KNOBS = {"budget": 12, "head_factor": 1.5, "safeguard": 0.5, "obs_window": 5, "kernel": 3}
LENGTHS = (1, 5, 6, 12, 13, 19, 40)


def keep(full, budget, head_factor, safeguard):
    """Tokens that each KV head keeps, from the scores of each head's tokens, which are infinite in the window."""
    heads = range(len(full))
    safe = [best(x, int(safeguard * budget * (1 + 1e-6))) | {i for i, s in x.items() if s == np.inf} for x in full]
    kept = [set(x) for x in safe]
    left = budget * len(full) - sum(map(len, kept))
    rest = [(-full[h][i], h, i) for h in heads for i in best(full[h], int(head_factor * budget)) - kept[h]]
    for _, h, i in sorted(rest)[:left]:
        kept[h].add(i)
    return kept


def run(q, k, v, prompt, inv_freq, budget, head_factor, safeguard, obs_window, kernel):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    score = [votes(q, k, h, prompt, obs_window, kernel) for h in range(len(k))]
    full = [dict(enumerate([*row, *[np.inf] * min(obs_window, prompt)])) for row in score]
    return keep_once(q, k, v, prompt, keep(full, budget, head_factor, safeguard))
