"""FreeKV: pages ranked for the previous query, or for the step's own in a KV head whose query has turned away."""

import numpy as np

from tests.oracles.plain import best, keep_all, rotate_all, softmax
from tests.oracles.quest import bound

KNOBS = {"budget": 8, "num_sink": 4, "num_local": 4, "page_size": 4, "tau": 0.05, "num_dense_layers": 0}
LENGTHS = (1, 4, 7, 8, 14, 16, 18, 40)
DIGITS = 6  # logarithms of scores are compared after rounding: what is equal in float32 must be equal here


def cosine(x, y):
    """Of two vectors; 0 if one is zero."""
    norms = np.linalg.norm(x) * np.linalg.norm(y)
    return float(x @ y) / norms if norms > 0 else 0.0


def newest(count, num_sink, num_local, page_size):
    """How many of ``count`` tokens are attended because they are new: whole pages, and the incomplete one behind them."""
    if count <= num_sink + num_local - page_size:
        return count
    rest = (count - num_sink) % page_size
    return num_local + rest - (page_size if rest > page_size // 2 else 0)


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_local, page_size, tau, num_dense_layers):
    """See the package's docstring; ``num_dense_layers`` must be 0, a layer is all there is."""
    assert num_dense_layers == 0
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group = q.shape[:2]

    def choose(t):
        zone = list(range(num_sink, t + 1 - newest(t + 1, num_sink, num_local, page_size)))
        firsts = zone[::page_size]
        assert len(zone) == len(firsts) * page_size
        chosen = []
        for h in range(heads):
            alike = np.mean([cosine(q[h, g, t], q[h, g, t - 1]) for g in range(group)])
            asked = q[h, :, t] if t == prompt or alike < tau else q[h, :, t - 1]
            shares = np.zeros(len(firsts))
            for g in range(group):
                pages = [k[h, first : first + page_size] for first in firsts]
                bounds = [bound(asked[g], page.min(axis=0), page.max(axis=0)) for page in pages]
                shares += softmax(bounds) if bounds else 0
            score = {first: round(float(np.log(share / group)), DIGITS) for first, share in zip(firsts, shares, strict=True)}
            picked = best(score, budget // page_size)
            left_out = {i for first in firsts if first not in picked for i in range(first, first + page_size)}
            chosen.append(set(range(t + 1)) - left_out)
        return chosen

    return keep_all(q, k, v, prompt, choose)
