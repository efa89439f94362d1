"""MagicPIG: prompt tokens with the query's bucket in two tables are attended, with corrected logits."""

import operator

import numpy as np

from tests.oracles.plain import Trace, best, dense_prompt, rotate_all, softmax
from tests.oracles.socket import bucket, random_planes

KNOBS = {"num_tables": 6, "num_bits": 3, "num_sink": 2, "num_local": 3, "capacity": 9, "dense_every": 0}
LENGTHS = (1, 2, 3, 5, 6, 7, 12, 40)


def correction(query, key, tables, bits):
    """The log of the chance that a key (without the mean) is sampled, a little smoothed."""
    norms = np.linalg.norm(query) * np.linalg.norm(key)
    cosine = float(query @ key) / norms if norms > 0 else 0.0
    same = (1 - np.arccos(np.clip(cosine, -1, 1)) / np.pi) ** bits
    return np.log(1 - (1 - same) ** tables - tables * same * (1 - same) ** (tables - 1) + 1e-4)


def sample(asked, own, capacity):
    """The tokens that each query head samples, a list of sets, and how many any of them samples before the cut.

    ``asked`` has the buckets of each query head, and ``own`` the buckets of the tokens, by token. If more than ``capacity``
    tokens are sampled, the tokens that share the most buckets with a query head stay.
    """
    equal = [{i: sum(map(operator.eq, mine, buckets)) for i, mine in own.items()} for buckets in asked]
    most = {i: max(found[i] for found in equal) for i in own}
    sampled = {i: count for i, count in most.items() if count >= 2}
    left = best(sampled, capacity)
    return [{i for i in left if found[i] >= 2} for found in equal], len(sampled)


def run(q, k, v, prompt, inv_freq, num_tables, num_bits, num_sink, num_local, capacity, dense_every):
    """See the package's docstring; ``dense_every`` must be 0, a layer is all there is."""
    assert dense_every == 0
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    heads, group, total, dim = q.shape
    planes = random_planes(num_tables, num_bits, dim)
    zone = list(range(num_sink, max(prompt - num_local, num_sink)))
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, total):
        chosen, out = [], np.zeros((heads, group, dim))
        for h in range(heads):
            mean = np.mean(k[h, zone], axis=0) if zone else np.zeros(dim)
            own = {i: [bucket(k[h, i] - mean, table) for table in planes] for i in zone}
            asked = [[bucket(q[h, g, t], table) for table in planes] for g in range(group)]
            sampled, _ = sample(asked, own, capacity)
            union = set(range(t + 1)) - set(zone)
            for g in range(group):
                query, logits = q[h, g, t], {}
                for i in range(t + 1):
                    logit, key = float(query @ k[h, i]) / np.sqrt(dim), k[h, i] - mean
                    if i not in zone:
                        logits[i] = logit
                    elif i in sampled[g]:
                        logits[i] = logit - correction(query, key, num_tables, num_bits)
                weight = softmax(list(logits.values()))
                out[h, g] = sum(w * v[h, i] for w, i in zip(weight, logits, strict=True))
                union |= set(logits)
            chosen.append(union)
        trace.add(t, out, chosen)
    return trace
