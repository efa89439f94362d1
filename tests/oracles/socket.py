"""SOCKET: tables of sign bits; a token's score is the sum of its buckets' probabilities for the query, times |v|."""

import itertools

import jax
import numpy as np

from tests.oracles.plain import best, keep_all, rotate_all, softmax

KNOBS = {"budget": 5, "num_sink": 2, "num_local": 4, "num_tables": 6, "num_bits": 3, "temperature": 0.3}
LENGTHS = (1, 2, 3, 5, 6, 7, 11, 40)
DIGITS = 9  # scores are compared after rounding: equal in exact arithmetic must be equal here


def random_planes(tables, bits, dim, seed=0):
    """Planes [L, P, D], the one constant taken from JAX's generator."""
    return np.asarray(jax.random.normal(jax.random.key(seed), (tables, bits, dim), np.float32), np.float64)


def bucket(x, planes):
    """The signs of a vector [D] beside the planes [P, D]; True where it is not on the negative side."""
    return tuple(bool(x @ plane >= 0) for plane in planes)


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_local, num_tables, num_bits, temperature):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, _, dim = q.shape
    planes = random_planes(num_tables, num_bits, dim)
    corners = list(itertools.product((False, True), repeat=num_bits))
    signs = np.where(corners, 1.0, -1.0)

    def choose(t):
        zone = list(range(num_sink, t + 1 - num_local))
        chosen = []
        for h in range(heads):
            score = dict.fromkeys(zone, 0.0)
            for g, table in itertools.product(range(group), range(num_tables)):
                soft = np.tanh(planes[table] @ q[h, g, t]) / np.sqrt(dim)
                likely = dict(zip(corners, softmax(signs @ soft / temperature), strict=True))
                for i in zone:
                    score[i] += likely[bucket(k[h, i], planes[table])]
            score = {i: round(x * float(np.linalg.norm(v[h, i])), DIGITS) for i, x in score.items()}
            chosen.append(best(score, budget) | (set(range(t + 1)) - set(zone)))
        return chosen

    return keep_all(q, k, v, prompt, choose)
