"""KeyDiff: blocks are appended, attend, and the keys most aligned with the mean direction leave.

A zero key has no direction: its unit vector counts as zero, so it scores 0, between similar and dissimilar keys.
"""

import numpy as np

from tests.oracles.plain import Trace, attend, best, rotate_all

KNOBS = {"budget": 12, "block": 4}
LENGTHS = (1, 3, 4, 5, 11, 12, 13, 39)


def unit(x):
    """Direction of a vector, zero for zero."""
    norm = np.linalg.norm(x)
    return x / norm if norm > 1e-8 else np.zeros(len(x))


def evict(k, positions, budget):
    """The positions kept of one KV head's rotated keys k [T, D]."""
    if len(positions) <= budget:
        return positions
    mean = np.zeros(k.shape[1])
    for i in positions:
        mean += unit(k[i]) / len(positions)
    return sorted(best({i: -float(unit(mean) @ unit(k[i])) for i in positions}, budget))


def run(q, k, v, prompt, inv_freq, budget, block):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    stored: list[list[int]] = [[] for _ in range(heads)]
    pieces = [range(s, min(s + block, prompt)) for s in range(0, prompt, block)]
    for piece in pieces + [range(t, t + 1) for t in range(prompt, total)]:
        out = np.zeros((heads, group, len(piece), dim))
        attended = []
        for h in range(heads):
            stored[h] = stored[h] + list(piece)
            attended.append(set(stored[h]))
            for g in range(group):
                for at, t in enumerate(piece):
                    seen = [i for i in stored[h] if i <= t]
                    out[h, g, at], _ = attend(q[h, g, t], [k[h, i] for i in seen], [v[h, i] for i in seen])
            stored[h] = evict(k[h], stored[h], budget)
        for at, t in enumerate(piece):
            trace.add(t, out[:, :, at], attended, [set(positions) for positions in stored])
    return trace
