"""TokenSelect: heads vote for single tokens, one set per layer; sinks + set + newest attend at re-numbered positions."""

import numpy as np

from tests.oracles.plain import Trace, attend, best, rotate, softmax

KNOBS = {"budget": 4, "num_sink": 2, "num_local": 8, "chunk": 8, "theta": 0.9}
LENGTHS = (1, 7, 8, 9, 13, 14, 15, 17, 40)


def mean_query(q, first, count, num_local, inv_freq):
    """Chunk mean [H, G, D] of un-rotated q [H, G, T, D], its i-th query first rotated to num_local + i."""
    heads, group, _, dim = q.shape
    mean = np.zeros((heads, group, dim))
    for h in range(heads):
        for g in range(group):
            for i in range(count):
                mean[h, g] += rotate(q[h, g, first + i], num_local + i, inv_freq) / count
    return mean


def votes(query, k, candidates):
    """What all query heads [H, G, D] together give each candidate, on un-rotated keys k [H, T, D], unscaled."""
    total = np.zeros(len(candidates))
    for h, g in np.ndindex(query.shape[:2]):
        total += softmax([float(query[h, g] @ k[h, t]) for t in candidates])
    return total


def pooled(total, kernel):
    """Maximum over (kernel - 1) // 2 neighbours to the left and kernel // 2 to the right, candidates only."""
    out = np.zeros(len(total))
    for i in range(len(total)):
        out[i] = max(total[j] for j in range(i - (kernel - 1) // 2, i + kernel // 2 + 1) if 0 <= j < len(total))
    return out


def select(query, k, length, budget, num_sink, num_local, kernel):
    """The ``budget`` chosen tokens, ascending, when ``length`` tokens are stored."""
    candidates = list(range(num_sink, length - num_local))
    score = pooled(votes(query, k, candidates), kernel)
    return sorted(best(dict(zip(candidates, score, strict=True)), budget))


def attend_slots(q, k, v, first, count, slots, inv_freq):
    """Queries ``first`` .. of all heads over ``slots``, keys rotated at their place in that list: [H, G, count, D]."""
    heads, group, _, dim = q.shape
    out = np.zeros((heads, group, count, dim))
    for h in range(heads):
        keys = [rotate(k[h, t], j, inv_freq) for j, t in enumerate(slots)]
        values = [v[h, t] for t in slots]
        for g in range(group):
            for i in range(count):
                place = len(slots) - count + i
                query = rotate(q[h, g, first + i], place, inv_freq)
                out[h, g, i], _ = attend(query, keys[: place + 1], values[: place + 1])
    return out


def cosine(a, b):
    """Cosine between two query sets [H, G, D], all heads in one vector; 0 if either is zero."""
    norm = np.sqrt(np.sum(a * a) * np.sum(b * b))
    return float(np.sum(a * b) / norm) if norm > 0 else 0.0


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_local, chunk, theta, kernel=1):
    """See the package's docstring."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, _, total, _ = q.shape
    limit = num_sink + budget + num_local

    def sparse(length, chosen):
        return [*range(num_sink), *chosen, *range(length - num_local, length)]

    def choose(first, count):
        query = mean_query(q, first, count, num_local, inv_freq)
        return select(query, k, first + count, budget, num_sink, num_local, kernel)

    pieces = []
    for first in range(0, prompt, chunk):
        count = min(chunk, prompt - first)
        length = first + count
        slots = list(range(length)) if length <= limit else sparse(length, choose(first, count))
        pieces.append(attend_slots(q, k, v, first, count, slots, inv_freq))
    trace = Trace(prompt=np.concatenate(pieces, axis=2))

    chosen, refreshed_at = None, None
    for t in range(prompt, total):
        length = t + 1
        if length <= limit:
            slots = list(range(length))
        else:
            if chosen is None or cosine(q[:, :, t], q[:, :, refreshed_at]) < theta:
                chosen, refreshed_at = choose(t, 1), t
            slots = sparse(length, chosen)
        trace.add(t, attend_slots(q, k, v, t, 1, slots, inv_freq)[:, :, 0], [set(slots)] * heads)
    return trace
