"""ShadowKV: keys of low rank before RoPE, chunks chosen by their landmarks, outliers and the end of the prompt exact.

Singular vectors are not unique: `run` takes those that were really used, and checks that no others of the same rank leave
less of its own keys out.
"""

import numpy as np

from tests.oracles.plain import Trace, attend, best, dense_prompt, rotate_all, softmax

KNOBS = {"budget": 8, "rank": 12, "chunk_size": 4, "outlier_chunks": 2, "local_chunks": 1}
LENGTHS = (1, 3, 4, 7, 8, 16, 23, 40)
STATE = {"right": "shadow.right"}  # [H, R, D] of one row; the heads' rows side by side are unit vectors
DIGITS = 6  # scores are compared after rounding: what is equal in float32 must be equal here


def is_best(vectors, keys):
    """Whether the rows of ``vectors`` [R, N] could be the first right singular vectors of ``keys`` [n, N], in float32."""
    gram = vectors @ vectors.T
    used = np.diag(gram) > 0.5  # there are no more than N
    if not np.allclose(gram, np.diag(used.astype(float)), atol=1e-4, rtol=0):
        return False
    most = np.linalg.svd(keys, compute_uv=False)[: int(used.sum())]
    found, whole = np.sum((keys @ vectors.T) ** 2), np.sum(keys**2)
    return bool(used.sum() == min(vectors.shape) and found >= np.sum(most**2) - 1e-4 * whole)


def unlike(keys):
    """The smallest cosine of a key of a chunk and the chunk's mean, squared with its sign."""
    mean, least = keys.mean(axis=0), np.inf
    for key in keys:
        norms = (key @ key) * (mean @ mean)
        least = min(least, (key @ mean) * abs(key @ mean) / norms if norms > 0 else 0.0)
    return round(float(least), DIGITS)


def run(q, k, v, prompt, inv_freq, budget, rank, chunk_size, outlier_chunks, local_chunks, right):
    """See the package's docstring."""
    heads, group, total, dim = q.shape
    vectors = np.asarray(right, np.float64).swapaxes(0, 1).reshape(rank, heads * dim)
    joined = np.asarray(k, np.float64)[:, :prompt].swapaxes(0, 1).reshape(prompt, heads * dim)
    assert is_best(vectors, joined), "no first singular vectors"
    low = (joined @ vectors.T @ vectors).reshape(prompt, heads, dim).swapaxes(0, 1)
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    low = rotate_all(low, inv_freq)
    chunks = [range(c * chunk_size, (c + 1) * chunk_size) for c in range(max(prompt // chunk_size - local_chunks, 0))]
    free = []
    for h in range(heads):
        likeness = {c: -unlike(k[h, chunk]) for c, chunk in enumerate(chunks)}
        free.append([c for c in likeness if c not in best(likeness, outlier_chunks)])
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, total):
        out, attended = np.zeros((heads, group, dim)), []
        for h in range(heads):
            score = dict.fromkeys(free[h], -np.inf)
            for g in range(group):
                logits = [q[h, g, t] @ k[h, chunks[c]].mean(axis=0) / np.sqrt(dim) for c in free[h]]
                for c, share in zip(free[h], softmax(logits) if logits else (), strict=True):
                    score[c] = max(score[c], round(float(np.log(share)), DIGITS))
            picked = best(score, budget // chunk_size)
            keys = {i: k[h, i] for i in range(t + 1)}
            for c in free[h]:
                for i in chunks[c]:
                    keys.pop(i)
                    if c in picked:
                        keys[i] = low[h, i]
            for g in range(group):
                out[h, g], _ = attend(q[h, g, t], list(keys.values()), [v[h, i] for i in keys])
            attended.append(set(keys))
        trace.add(t, out, attended)
    return trace
