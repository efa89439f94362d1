"""OracleEviction: the tokens that the coming answer attends to, or whose lack would move its outputs, stay."""

import numpy as np

from tests.oracles.oracle import drawn, scores
from tests.oracles.plain import best, keep_once, rotate, rotate_all

KNOBS = {"budget": 12, "by": "attention", "ahead": 5}
LENGTHS = (1, 3, 11, 12, 13, 40)


def answered(logits, prompt, answer, ends):
    """The token ids that follow a prompt greedily, up to an end, from logits [T, V]; token id t is the token at t."""
    ids = [int(np.argmax(logits[prompt - 1]))]
    while len(ids) < answer:
        ids.append(int(np.argmax(logits[ids[-1]])))
    before = next((at for at, token in enumerate(ids) if token in ends), len(ids))
    return ids[: max(before, 1)]


def kept(q, k, v, logits, prompt, inv_freq, budget, by, ahead, ends=()):
    """The positions of the prompt that each head of each layer keeps, of q [L, H, G, T, D], k and v [L, H, T, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    ids, held = answered(logits, prompt, ahead, ends), []
    for layer, (queries, keys, values) in enumerate(zip(q, k, v, strict=True)):
        held.append([])
        for h in range(len(keys)):
            seen = [rotate(keys[h, i], i, inv_freq) for i in range(prompt)]
            later = [rotate(keys[h, x], prompt + j, inv_freq) for j, x in enumerate(ids)]
            total = np.array([drawn(i, prompt) for i in range(prompt)], np.float64) if by == "random" else np.zeros(prompt)
            for j in range(len(ids) if by != "random" else 0):
                everything = list(values[h, :prompt]) + [values[h, x] for x in ids[: j + 1]]
                for g in range(q.shape[2]):
                    query = rotate(queries[h, g, ids[j]], prompt + j, inv_freq)
                    total += scores(by, query, seen + later[: j + 1], everything, 0)[0][:prompt]
            held[layer].append(best({i: round(float(x), 9) for i, x in enumerate(total)}, budget))
    return held


def run(q, k, v, logits, prompt, inv_freq, **knobs):
    """The traces of all layers; see `kept`."""
    turned = [rotate_all(x, inv_freq) for x in (q, k)]
    held = kept(q, k, v, logits, prompt, inv_freq, **knobs)
    return [keep_once(turned[0][at], turned[1][at], np.asarray(v[at], np.float64), prompt, held[at]) for at in range(len(k))]
