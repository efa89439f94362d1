"""Quest: pages ranked by an upper bound of q.k, the group's largest deciding; the newest page is always attended."""

import numpy as np

from tests.oracles.plain import best, keep_all, rotate_all

KNOBS = {"budget": 12, "page_size": 4, "num_dense_layers": 0}
LENGTHS = (1, 3, 4, 5, 11, 12, 13, 40)


def bound(query, low, high):
    """Largest q.k any key between ``low`` and ``high`` could have."""
    total = 0.0
    for c in range(len(query)):
        total += max(query[c] * low[c], query[c] * high[c])
    return total


def pages_of(k, length, page_size):
    """Bounds of each page of the first ``length`` rotated keys [T, D]; the last page has only the tokens present."""
    pages = []
    for first in range(0, length, page_size):
        keys = k[first : min(first + page_size, length)]
        pages.append((keys.min(axis=0), keys.max(axis=0)))
    return pages


def pick(q, k, h, t, budget, page_size):
    """Positions that KV head h attends to at token t, by rotated q [H, G, T, D] and k [H, T, D]."""
    pages = pages_of(k[h], t + 1, page_size)
    score = {p: max(bound(q[h, g, t], *pages[p]) for g in range(q.shape[1])) for p in range(len(pages) - 1)}
    picked = best(score, budget // page_size - 1) | {len(pages) - 1}
    return {i for i in range(t + 1) if i // page_size in picked}


def run(q, k, v, prompt, inv_freq, budget, page_size, num_dense_layers):
    """See the package's docstring; ``num_dense_layers`` must be 0, a layer is all there is."""
    assert num_dense_layers == 0
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    return keep_all(q, k, v, prompt, lambda t: [pick(q, k, h, t, budget, page_size) for h in range(len(k))])
