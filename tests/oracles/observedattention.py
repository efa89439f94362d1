"""ObservedAttention: the tokens with the largest mean attention, over the queries that see them, stay after the prompt."""

import numpy as np

from tests.oracles.plain import best, keep_once, rotate_all, softmax

KNOBS = {"budget": 12}
LENGTHS = (1, 11, 12, 13, 40)


def run(q, k, v, prompt, inv_freq, budget):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    kept = []
    for h in range(len(k)):
        received: list[list[float]] = [[] for _ in range(prompt)]
        for g in range(q.shape[1]):
            for t in range(prompt):
                weight = softmax([float(q[h, g, t] @ k[h, i]) / np.sqrt(q.shape[3]) for i in range(t + 1)])
                for i in range(t + 1):
                    received[i].append(weight[i])
        kept.append(best({i: sum(weights) / len(weights) for i, weights in enumerate(received)}, budget))
    return keep_once(q, k, v, prompt, kept)
