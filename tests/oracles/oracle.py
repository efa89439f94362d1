"""Oracle: the tokens with the most attention, the largest change of the output if left out, or drawn, of those needed."""

import numpy as np

from tests.oracles.plain import Trace, attend, best, dense_prompt, rotate_all

KNOBS = {"budget": 12, "by": "attention", "heads": "sum", "mass": 1.0}
LENGTHS = (1, 3, 10, 11, 12, 13, 40)
DIGITS = 9  # scores are compared after rounding: equal in exact arithmetic must be equal here


def drawn(position, at):
    """The number that a token has in a step."""
    word = ((position * 0x9E3779B1) ^ (at * 0x85EBCA77)) % 2**32
    for shift, odd in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        word = (word ^ (word >> shift)) * odd % 2**32
    return word >> 8


def scores(by, query, keys, values, at):
    """The scores of tokens 0, 1, ... for one query head, and their attention."""
    out, weight = attend(query, keys, values)
    if by == "attention":
        return weight, weight
    if by == "random":
        return np.array([drawn(i, at) for i in range(len(keys))], np.float64), weight
    moved = []
    for i in range(len(keys)):  # what the definition says: the output without token i
        others = [j for j in range(len(keys)) if j != i]
        without = attend(query, [keys[j] for j in others], [values[j] for j in others])[0] if others else np.inf
        moved.append(np.linalg.norm(without - out))
    return np.array(moved), weight


def needed(weight, mass):
    """The fewest tokens with this share of the attention, and those that have as much as the least of them."""
    total, taken = 0.0, np.inf
    for x in sorted(weight, reverse=True):
        if total >= mass * weight.sum() and mass < 1:
            break
        total, taken = total + x, x
    return {i for i, x in enumerate(weight) if x >= taken or mass == 1}


def run(q, k, v, prompt, inv_freq, budget, by, heads, mass):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    count, group, total, dim = q.shape
    trace = Trace(prompt=dense_prompt(q, k, v, prompt))
    for t in range(prompt, total):
        chosen, out = [], np.zeros((count, group, dim))
        for h in range(count):
            keys, values = list(k[h, : t + 1]), list(v[h, : t + 1])
            told = [scores(by, q[h, g, t], keys, values, t) for g in range(group)]
            wanted = [needed(weight, mass) | {t} for _, weight in told]
            own = []
            for g in range(group):
                score = told[g][0] if heads == "each" else np.sum([one for one, _ in told], axis=0)
                among = wanted[g] if heads == "each" else set().union(*wanted)
                ranked = {i: round(float(score[i]), DIGITS) for i in among - {t}}
                own.append(sorted(best(ranked, budget - 1) | {t}))
                out[h, g], _ = attend(q[h, g, t], [keys[i] for i in own[g]], [values[i] for i in own[g]])
            chosen.append(set().union(*map(set, own)))
        trace.add(t, out, chosen)
    return trace
