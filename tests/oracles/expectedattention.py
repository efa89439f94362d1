"""ExpectedAttention: a normal distribution of the queries to come says which tokens stay, once after the prompt."""

import numpy as np

from tests.oracles.plain import best, keep_once, rotate, rotate_all, softmax

KNOBS = {"budget": 12, "num_sink": 2, "num_future": 7}
LENGTHS = (1, 2, 3, 11, 12, 13, 40)


def keep(q, rotated, v, h, tokens, seen, inv_freq, budget, num_sink, num_future):
    """Which of ``tokens`` KV head ``h`` keeps after ``seen`` tokens, from q before rotation and rotated keys."""
    if len(tokens) <= budget:
        return set(tokens)
    dim = q.shape[3]
    turn = np.zeros((dim, dim))
    for position in range(seen, seen + num_future):
        for c in range(dim):
            turn[:, c] += rotate(np.eye(dim)[c], position, inv_freq) / num_future
    first, others = [i for i in tokens if i < num_sink], [i for i in tokens if i >= num_sink]
    share = np.zeros(len(others))
    for g in range(q.shape[1]):
        queries = [turn @ q[h, g, t] for t in range(num_sink, seen)]
        mean = sum(queries) / len(queries)
        covariance = sum(np.outer(x - mean, x - mean) for x in queries) / len(queries)
        keys = rotated[h, others]
        share += softmax([float(mean @ x) / np.sqrt(dim) + float(x @ covariance @ x) / (2 * dim) for x in keys])
    share /= q.shape[1]
    score = {i: share[at] * np.linalg.norm(v[h, i]) for at, i in enumerate(others)}
    return best(score, budget - len(first)) | set(first)


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_future):
    """See the package's docstring."""
    q, v, rotated = np.asarray(q, np.float64), np.asarray(v, np.float64), rotate_all(k, inv_freq)
    knobs = {"budget": budget, "num_sink": num_sink, "num_future": num_future}
    kept = [keep(q, rotated, v, h, list(range(prompt)), prompt, inv_freq, **knobs) for h in range(len(k))]
    return keep_once(rotate_all(q, inv_freq), rotated, v, prompt, kept)
