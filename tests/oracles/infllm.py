"""InfLLM: blocks behind a local window, chosen for each chunk by their representatives; one distance beyond the window."""

import numpy as np

from tests.oracles.plain import Trace, best, rotate, rotate_all, softmax

KNOBS = {"budget": 8, "num_sink": 2, "num_local": 8, "block_size": 4, "num_repr": 2, "chunk": 8}
LENGTHS = (1, 7, 9, 11, 13, 14, 26, 40)


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_local, block_size, num_repr, chunk):
    """See the package's docstring."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    near_q, near_k = rotate_all(q, inv_freq), rotate_all(k, inv_freq)
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    received = np.zeros((heads, group, total))
    representative = []  # [heads, group, dim] of each block

    def blocks(tokens):
        return max(tokens - num_sink - num_local, 0) // block_size

    pieces = [(first, min(chunk, prompt - first)) for first in range(0, prompt, chunk)]
    for before, count in pieces + [(t, 1) for t in range(prompt, total)]:
        score = dict.fromkeys(range(blocks(before)), 0.0)
        far = np.zeros((heads, group, count, dim))
        for h, g, i in np.ndindex(heads, group, count):
            far[h, g, i] = rotate(q[h, g, before + i], num_local - 1, inv_freq)
        for block in score:
            score[block] = float(np.sum(representative[block] * far.sum(axis=2)))
        chosen = best(score, budget // block_size)

        def listed(j):
            block = (j - num_sink) // block_size
            return j < num_sink or block >= len(score) or block in chosen  # noqa: B023

        for i in range(count):
            at, out = before + i, np.zeros((heads, group, dim))
            seen = [j for j in range(at + 1) if at - j < num_local or listed(j)]
            for h, g in np.ndindex(heads, group):
                near, away = near_k[h] @ near_q[h, g, at], k[h] @ far[h, g, i]
                logits = [(near[j] if at - j < num_local else away[j]) / np.sqrt(dim) for j in seen]
                for j, weight in zip(seen, softmax(logits), strict=True):
                    out[h, g] += weight * v[h, j]
                    if at - j < num_local:
                        received[h, g, j] += weight
            trace.add(at, out, [set(seen)] * heads)
        for block in range(blocks(before), blocks(before + count)):
            tokens = range(num_sink + block * block_size, num_sink + (block + 1) * block_size)
            made = np.zeros((heads, group, dim))
            for h, g in np.ndindex(heads, group):
                for j in best({j: received[h, g, j] for j in tokens}, num_repr):
                    made[h, g] += k[h, j] / num_repr
            representative.append(made)
    return trace
