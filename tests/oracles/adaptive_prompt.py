"""Prompts of XAttention and FlexPrefill, in float64 loops: what each query sees where the text decides how much."""

import numpy as np

from tests.oracles.plain import softmax


def fewest(weight, certain, share):
    """The certain entries of a dict of weights, and the heaviest others until all have ``share`` of the sum.

    Of equally heavy ones all are taken, and with a share of 1 everything is.
    """
    if share >= 1:
        return set(weight)
    kept, held = set(certain), sum(weight[i] for i in certain)
    for i in sorted(weight, key=lambda i: -weight[i]):
        if i in kept:
            continue
        if held >= share * sum(weight.values()) and not any(weight[i] == weight[j] for j in kept - set(certain)):
            break
        kept.add(i)
        held += weight[i]
    return kept


def antidiagonal_scores(q, k, block, stride):
    """The score of each pair of blocks: a dict (i, j) -> weight, for rotated q and k [T, D] of a whole prompt.

    Tokens that do not exist count as zeros in the last vector.
    """
    length, dim = q.shape
    parts, vectors = block // stride, -(-length // stride)
    scores: dict[tuple[int, int], float] = {}
    for u in range(vectors):
        logits = []
        for v in range(u + 1):
            pairs = [(u * stride + stride - 1 - r, v * stride + r) for r in range(stride)]
            dots = [float(q[a] @ k[b]) for a, b in pairs if a < length and b < length]
            logits.append(sum(dots) / (stride * np.sqrt(dim)))
        for v, chance in enumerate(softmax(logits)):
            at = u // parts, v // parts
            scores[at] = scores.get(at, 0.0) + chance
    return scores


def xattention_blocks(q, k, share, block, stride):
    """The blocks of keys of each block of queries: a list of sets."""
    scores = antidiagonal_scores(q, k, block, stride)
    blocks = -(-len(q) // block)
    return [fewest({j: scores[i, j] for j in range(i + 1)}, {0, i}, share) for i in range(blocks)]


def blasst_blocks(q, k, threshold, start, rows=64, block=192):
    """The blocks of keys of each ``rows`` queries of the chunk from ``start`` on, of rotated q and k up to its end: sets."""
    found = []
    for first in range(start, len(q), rows):
        found.append({0})
        for t in range(first, min(first + rows, len(q))):
            running, logits = -np.inf, k[: t + 1] @ q[t] / np.sqrt(q.shape[1])
            for j in reversed(range(t // block + 1)):
                largest = max(logits[j * block : (j + 1) * block])
                running = max(running, largest)
                if largest >= running - threshold:
                    found[-1].add(j)
    return found


def _means(x, block):
    return [np.mean(x[i : i + block], axis=0) for i in range(0, len(x), block)]


def estimate_error(q, k, window, block, start):
    """The root of the Jensen-Shannon divergence between the attention of the last queries and its estimate by blocks.

    The queries are the last of rotated q [T, D], which is a prompt up to the end of the chunk that begins at ``start``.
    """
    length, dim = q.shape
    first, blocks = max(start, length - window), -(-length // block)
    truth = np.zeros(blocks)
    for t in range(first, length):
        for i, chance in enumerate(softmax([float(q[t] @ k[i]) / np.sqrt(dim) for i in range(t + 1)])):
            truth[i // block] += chance / (length - first)
    mean = np.mean(q[first:], axis=0)
    estimate = softmax([float(mean @ key) / np.sqrt(dim) for key in _means(k[:length], block)])
    middle = (truth + estimate) / 2
    parts = [sum(p * np.log(p / m) for p, m in zip(x, middle, strict=True) if p > 0) for x in (truth, estimate)]
    return float(np.sqrt(max(0.0, sum(parts) / 2)))


def flexprefill_blocks(q, k, share, least, block, start):
    """The blocks of keys of each block of queries of the chunk from ``start`` on: a dict of sets."""
    rows = range(start // block, -(-len(q) // block))
    queries, keys = _means(q, block), _means(k[: len(q)], block)
    logits = {i: [float(queries[i] @ keys[j]) / np.sqrt(q.shape[1]) for j in range(i + 1)] for i in rows}
    weight = {(i, j): chance for i in rows for j, chance in enumerate(softmax(logits[i]))}
    kept = fewest(weight, {(i, j) for i in rows for j in {0, i}}, share)
    # The own block is the first of the ``least`` best.
    best = {i: {i, *sorted(range(i), key=lambda j: -logits[i][j])[: least - 1]} for i in rows}
    return {i: best[i] | {j for j in range(i + 1) if (i, j) in kept} for i in rows}
