"""TOVAOnce: the tokens to which the prompt's last query attends most stay, one set per layer, and the last token stays."""

import numpy as np

from tests.oracles.plain import best, keep_once, rotate_all, softmax

KNOBS = {"budget": 12}
LENGTHS = (1, 3, 11, 12, 13, 40)


def run(q, k, v, prompt, inv_freq, budget):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, _, dim = q.shape
    score = dict.fromkeys(range(prompt), 0.0)
    for h in range(heads):
        for g in range(group):
            weight = softmax([float(q[h, g, prompt - 1] @ k[h, i]) / np.sqrt(dim) for i in range(prompt)])
            for i in range(prompt):
                score[i] += weight[i]
    score[prompt - 1] = np.inf
    return keep_once(q, k, v, prompt, [best(score, budget)] * heads)
