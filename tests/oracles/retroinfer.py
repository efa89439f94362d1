"""RetroInfer: tokens of the best clusters and estimates of the next, under one softmax; new clusters while decoding."""

import math

import numpy as np

from tests.oracles.plain import Trace, best, dense_prompt, rotate_all, softmax

KNOBS = {
    "fraction": 0.25, "estimated": 0.4, "num_sink": 2, "num_local": 4, "cluster_size": 4, "segment": 16, "buffer": 8,
    "iterations": 3,
}  # fmt: skip
LENGTHS = (1, 5, 6, 13, 14, 15, 23, 40)


def nearest(x, centroids):
    """The centroid with the largest product, the first of those that are equal but for rounding."""
    product = np.array([x @ c for c in centroids])
    return int(np.argmax(product >= product.max() - 1e-5 * np.abs(product).max()))


def cluster(key, value, parts, cluster_size, iterations):
    """Clusters of one head's keys [N, D] in ``parts`` of the tokens: a list of (centroid, sum of values, members)."""
    mean, made = key.mean(axis=0), []
    centred = key - mean
    for part in parts:
        count = max(len(part) // cluster_size, 1)
        centroids = [centred[part[(2 * i + 1) * len(part) // (2 * count)]] for i in range(count)]
        for _ in range(iterations - 1):
            own = [nearest(centred[t], centroids) for t in part]
            for c in range(count):
                members = [t for t, mine in zip(part, own, strict=True) if mine == c]
                total, less = key[members].sum(axis=0), len(members) * mean
                norm = np.linalg.norm(total - less)
                if members and norm > 1e-5 * (np.linalg.norm(total) + np.linalg.norm(less)):  # else it is 0
                    centroids[c] = (total - less) / norm
        made += centroids
    own, found = [nearest(x, made) for x in centred], []
    for c, centroid in enumerate(made):
        members = [t for t, mine in enumerate(own) if mine == c]
        centroid = key[members].mean(axis=0) if members else centroid + mean
        found.append((centroid, value[members].sum(axis=0), members))
    return found


def run(q, k, v, prompt, inv_freq, fraction, estimated, num_sink, num_local, cluster_size, segment, buffer, iterations):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    clusters = [[] for _ in range(heads)]
    end = num_sink

    def add(first, last, parts):
        for h in range(heads):
            for centroid, values, members in cluster(k[h, first:last], v[h, first:last], parts, cluster_size, iterations):
                clusters[h].append((centroid, values, [first + t for t in members]))

    def share(part, count):
        return min(count, max(math.ceil(part * count * (1 - 1e-6)), 1)) if count else 0

    tokens = prompt - num_sink - num_local
    if tokens >= buffer:
        add(num_sink, num_sink + tokens, [range(i, min(i + segment, tokens)) for i in range(0, tokens, segment)])
        end += tokens
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, total):
        out, attended = np.zeros((heads, group, dim)), []
        for h in range(heads):
            here = clusters[h]
            logits = np.array([[q[h, g, t] @ c / np.sqrt(dim) for c, _, _ in here] for g in range(group)])
            score = sum(softmax(x) for x in logits) if here else []
            score = {c: x for c, x in enumerate(score) if here[c][2]}
            first = best(score, share(fraction, len(here)))
            second = best(score, share(fraction + estimated, len(here))) - first
            seen = {i for i in range(t + 1) if i < num_sink or i >= end} | {i for c in first for i in here[c][2]}
            attended.append(seen)
            for g in range(group):
                above, below = np.zeros(dim), 0.0
                for i in seen:
                    weight = np.exp(q[h, g, t] @ k[h, i] / np.sqrt(dim))
                    above, below = above + weight * v[h, i], below + weight
                for c in second:
                    weight = np.exp(logits[g, c])
                    above, below = above + weight * here[c][1], below + weight * len(here[c][2])
                out[h, g] = above / below
        trace.add(t, out, attended)
        if t + 1 - end - num_local == buffer:
            add(end, end + buffer, [range(buffer)])
            end += buffer
    return trace
