"""ParisKV: sink, local and buffer dense; of the tokens between, hash votes propose and 4-bit codes re-rank.

Token positions of one row fall into ``[sink | retrieval zone | local | buffer]``. A zone key is rotated (random signs,
Hadamard), cut into slices of 8 channels and stored as the sign pattern of each slice, a 3-bit magnitude per channel and
one weight per slice. Regions are the same for all KV heads; everything else is per KV head.
"""

import dataclasses
import math

import jax
import ml_dtypes
import numpy as np

from tests.oracles.plain import best, keep_all, rotate_all

KNOBS = {"budget": 5, "num_sink": 2, "num_local": 4, "buffer": 4, "dense_below": 17}
LENGTHS = (1, 2, 3, 5, 6, 7, 9, 10, 15, 16, 17, 40)

SLICE = 8  # channels per slice, hence 256 sign patterns
# The code keeps both tables in bfloat16.
THRESHOLDS = [float(ml_dtypes.bfloat16(x)) for x in (0.0843, 0.1698, 0.2578, 0.3499, 0.4487, 0.5585, 0.6901)]
LEVELS = [float(ml_dtypes.bfloat16(x)) for x in (0.0420, 0.1266, 0.2130, 0.3025, 0.3973, 0.5001, 0.6169, 0.7633)]
TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)  # shares of rho; a cluster's vote is the number of tiers it starts in
DIGITS = 9  # scores are compared after rounding: equal in exact arithmetic must be equal here


@dataclasses.dataclass
class Code:
    """One encoded key; S = D / 8 slices."""

    ids: np.ndarray  # int [S], sign patterns, bit j = channel j of the slice is >= 0
    sign: np.ndarray  # bool [S, 8], True = >= 0
    level: np.ndarray  # int [S, 8], index into LEVELS
    alpha: np.ndarray  # float64 [S], cosine-like overlap of the coded and the true direction
    weight: np.ndarray  # float64 [S], holding bfloat16 values


def random_signs(dim, seed=42):
    """The sign flips [D] of the rotation, the one constant taken from JAX's generator."""
    return np.asarray(jax.random.rademacher(jax.random.key(seed), (dim,), np.float32), np.float64)


def hadamard(dim):
    """Sylvester's matrix [D, D], orthonormal."""
    matrix = np.zeros((dim, dim))
    for i in range(dim):
        for j in range(dim):
            matrix[i, j] = -1.0 if (i & j).bit_count() % 2 else 1.0
    return matrix / np.sqrt(dim)


def turn(x, signs, matrix, rotate=True):
    """The random rotation of a vector [D]."""
    return matrix @ (signs * x) if rotate else x


def encode(key, signs, matrix, rotate=True):
    """`Code` of one RoPE'd key [D]."""
    key = np.asarray(key, np.float64)
    norm = float(np.sqrt((key * key).sum()))
    y = turn(key / max(norm, 1e-8), signs, matrix, rotate)
    slices = len(key) // SLICE
    code = Code(
        ids=np.zeros(slices, int),
        sign=np.zeros((slices, SLICE), bool),
        level=np.zeros((slices, SLICE), int),
        alpha=np.zeros(slices),
        weight=np.zeros(slices),
    )
    for b in range(slices):
        part = y[b * SLICE : (b + 1) * SLICE]
        radius = float(np.sqrt((part * part).sum()))
        for j in range(SLICE):
            size = abs(part[j]) / max(radius, 1e-8)
            code.sign[b, j] = part[j] >= 0
            code.ids[b] += int(part[j] >= 0) << j
            code.level[b, j] = sum(threshold < size for threshold in THRESHOLDS)
            code.alpha[b] += LEVELS[code.level[b, j]] * size
        weight = norm * radius / max(code.alpha[b], 1e-6)
        code.weight[b] = float(ml_dtypes.bfloat16(weight))
    return code


def estimate(code, query):
    """Estimated q.k from a key's code and the rotated query [D], which carries its length."""
    total = 0.0
    for b in range(len(code.ids)):
        for j in range(SLICE):
            level = LEVELS[code.level[b, j]]
            total += code.weight[b] * (level if code.sign[b, j] else -level) * query[b * SLICE + j]
    return total


def schedule(length):
    """(rho, beta) of a retrieval zone of ``length`` keys."""
    if length < 5000:
        return 0.5, 0.5
    if length < 10000:
        return 0.3, 0.25
    if length < 30000:
        return 0.25, 0.20
    return 0.20, 0.10


def ceil(x):
    """The next whole number, a product's rounding error forgiven."""
    return math.ceil(x - 1e-6)


def cluster_votes(part, counts, length, rho):
    """Vote 0..6 of each of the 256 clusters of one slice, for the query's slice [8] and the keys in each cluster."""
    score = {}
    for cluster in range(1 << SLICE):
        score[cluster] = 0.0
        for j in range(SLICE):
            score[cluster] += part[j] if cluster >> j & 1 else -part[j]
    votes, before = {}, 0
    for cluster in sorted(score, key=lambda c: (-round(score[c], DIGITS), c)):
        votes[cluster] = sum(before < ceil(length * rho * tier) for tier in TIERS)
        before += counts.get(cluster, 0)
    return votes


def collisions(query, codes, rho):
    """Sum of the votes of each key's clusters: zone index to 0 .. 6 * slices, for the rotated query [D]."""
    total = dict.fromkeys(range(len(codes)), 0)
    for b in range(len(query) // SLICE):
        counts = {}
        for code in codes:
            counts[code.ids[b]] = counts.get(code.ids[b], 0) + 1
        votes = cluster_votes(query[b * SLICE : (b + 1) * SLICE], counts, len(codes), rho)
        for i, code in enumerate(codes):
            total[i] += votes[code.ids[b]]
    return total


def retrieve(query, codes, budget, rho=None, beta=None):
    """Zone indices picked for the rotated query [D]: (candidates, the best of them), both sets."""
    usual = schedule(len(codes))
    rho = usual[0] if rho is None else rho
    beta = usual[1] if beta is None else beta
    candidates = best(collisions(query, codes, rho), ceil(beta * len(codes)))
    score = {i: round(estimate(codes[i], query), DIGITS) for i in candidates}
    return candidates, best(score, min(budget, len(candidates)))


def first_stop(prompt, num_sink, num_local):
    """End of the retrieval zone after a prompt of ``prompt`` tokens."""
    return max(num_sink, prompt - num_local)


def next_stop(stop, length, num_local, buffer):
    """End of the zone for the step of the ``length``-th token: whole buffers move out of local ++ buffer, oldest first."""
    while length - stop - num_local >= buffer:
        stop += buffer
    return stop


def is_dense(length, stop, budget, num_sink, num_local, dense_below):
    """Whether the decode step at ``length`` tokens (its own included) attends to everything."""
    return length < max(dense_below, num_sink + num_local + 2 * budget) or stop <= num_sink


def run(q, k, v, prompt, inv_freq, budget, num_sink, num_local, buffer, dense_below, rho=None, beta=None, seed=42):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, _, dim = q.shape
    signs, matrix = random_signs(dim, seed), hadamard(dim)
    stop = first_stop(prompt, num_sink, num_local)
    codes = [[] for _ in range(heads)]  # of the zone's keys, in order

    def choose(t):
        nonlocal stop
        stop = next_stop(stop, t + 1, num_local, buffer)  # the code empties a full buffer before it attends
        for h in range(heads):
            for i in range(num_sink + len(codes[h]), stop):
                codes[h].append(encode(k[h, i], signs, matrix))
        chosen = []
        for h in range(heads):
            if is_dense(t + 1, stop, budget, num_sink, num_local, dense_below):
                chosen.append(set(range(t + 1)))
                continue
            # Scaling the query changes neither ranking, so its length is left in: |q| * <v, rot(q / |q|)>.
            query = turn(sum(q[h, g, t] for g in range(group)) / group, signs, matrix)
            _, picked = retrieve(query, codes[h], budget, rho, beta)
            chosen.append(set(range(num_sink)) | {num_sink + i for i in picked} | set(range(stop, t + 1)))
        return chosen

    return keep_all(q, k, v, prompt, choose)
