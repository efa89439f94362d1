"""InfiniGen: tokens whose logits, by a guess of the query and few channels, come near the largest; as many in each head."""

import numpy as np

from tests.oracles.plain import best, keep_all, rotate_all

KNOBS = {"budget": 9, "ratio": 0.5, "alpha": 1.0, "obs_window": 20, "num_dense_layers": 0}
LENGTHS = (1, 2, 4, 8, 9, 10, 21, 40)
DIGITS = 6  # scores are compared after rounding: what is equal in float32 must be equal here


def channels(queries, count):
    """P [D, count] of the queries [n, D]: the singular vectors with most of the absolute products, 0 without energy."""
    dim = queries.shape[1]
    vectors = np.linalg.svd(queries, full_matrices=True)[2].T
    weight = [float(sum(abs(query @ vectors[:, c]) for query in queries)) for c in range(dim)]
    chosen = sorted(best(dict(enumerate(weight)), count))
    known = [weight[c] > np.sqrt(dim * 2.0**-23) * max(weight) for c in chosen]
    return np.where(known, vectors[:, chosen], 0)


def run(q, k, v, prompt, inv_freq, budget, ratio, alpha, obs_window, num_dense_layers, guess=None):
    """See the package's docstring. ``guess`` is like q: what a layer searches by; None: its query."""
    asked = rotate_all(q if guess is None else guess, inv_freq)
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, _, dim = q.shape
    first = max(prompt - obs_window, 0)
    matrix = [channels(q[h, :, first:prompt].reshape(-1, dim), max(int(dim * ratio), 1)) for h in range(heads)]

    def choose(t):
        logits = np.zeros((heads, group, t))
        for h, g, i in np.ndindex(*logits.shape):
            logits[h, g, i] = (asked[h, g, t] @ matrix[h]) @ (k[h, i] @ matrix[h]) / np.sqrt(dim)
        logits = np.round(logits, DIGITS)
        near = [sum(x >= row.max() - alpha for x in row) for row in logits.reshape(-1, t)]
        wanted = t if t <= budget else min(int(np.mean(near)), budget)
        return [best(dict(enumerate(logits[h].mean(axis=0).round(DIGITS))), wanted) | {t} for h in range(heads)]

    return keep_all(q, k, v, prompt, choose)
