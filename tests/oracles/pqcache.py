"""PQCache: k-means of the prompt's keys, cut into parts; tokens are searched by the centroids of their parts."""

import numpy as np

from tests.oracles.plain import best, keep_all, rotate_all, softmax

KNOBS = {"fraction": 0.5, "recent_share": 0.5, "num_sink": 2, "num_subvectors": 2, "num_centroids": 4, "iterations": 3}
LENGTHS = (1, 2, 3, 6, 7, 9, 14, 40)
DIGITS = 9  # scores are compared after rounding: equal in exact arithmetic must be equal here


def group_scores(logits, zone):
    """By slot of the list ``zone``: the sum over query heads of the softmax of their logits [G][len(zone)]."""
    if not zone:
        return {}
    shares = np.sum([softmax(row) for row in logits], axis=0)
    return {i: round(float(np.log(share)), DIGITS) for i, share in zip(zone, shares, strict=True)}


def nearest(part, centroids):
    """The first of the nearest centroids."""
    return min(range(len(centroids)), key=lambda c: (round(float(np.sum((part - centroids[c]) ** 2)), 9), c))


def kmeans(parts, count, iterations):
    """Lloyd's iterations from evenly spaced vectors; a centroid without members stays."""
    centroids = [parts[j * len(parts) // count] if parts else 0.0 for j in range(count)]
    for _ in range(iterations):
        owner = [nearest(x, centroids) for x in parts]
        for c in range(count):
            members = [x for x, own in zip(parts, owner, strict=True) if own == c]
            if members:
                centroids[c] = np.mean(members, axis=0)
    return centroids


def floor(x):
    """Rounded down after a millionth more, as the docstring of the method says."""
    return int(np.floor(x * (1 + 1e-6)))


def run(q, k, v, prompt, inv_freq, fraction, recent_share, num_sink, num_subvectors, num_centroids, iterations):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    size, behind = dim // num_subvectors, max(prompt - num_sink, 0)
    recent, wanted = floor(behind * fraction * recent_share), floor(behind * fraction * (1 - recent_share))
    if behind <= num_centroids:
        recent = wanted = num_centroids
    coded = k.copy()  # keys that are made of centroids
    for h in range(heads):
        for part in range(num_subvectors):
            cut = slice(part * size, (part + 1) * size)
            centroids = kmeans([k[h, i, cut] for i in range(num_sink, prompt)], num_centroids, iterations)
            for i in range(num_sink, total):
                coded[h, i, cut] = centroids[nearest(k[h, i, cut], centroids)]

    def choose(t):
        zone = list(range(num_sink, t - recent))
        chosen = []
        for h in range(heads):
            logits = [[float(q[h, g, t] @ coded[h, i]) / np.sqrt(dim) for i in zone] for g in range(group)]
            chosen.append(best(group_scores(logits, zone), wanted) | (set(range(t + 1)) - set(zone)))
        return chosen

    return keep_all(q, k, v, prompt, choose)
