"""KVzip: the tokens that receive the most attention from any query of a second reading, which repeats the prompt, stay."""

import numpy as np

from tests.oracles.plain import keep_once, rotate, rotate_all, softmax

KNOBS = {
    "budget": 12, "head_factor": 1.5, "layerwise": False, "num_sink": 2, "chunk": 7, "overlap": 3,
    "ask": (5, 3), "ask_later": (7,), "answer": (4, 9),
}  # fmt: skip
LENGTHS = (1, 2, 3, 9, 10, 12, 13, 40)


def readings(prompt, num_sink, chunk, overlap, ask, ask_later, answer):
    """(positions of a chunk, positions of its overlap, ids in front of that, ids behind that), for each chunk."""
    before: list[int] = []
    for first in range(num_sink, prompt, chunk):
        part = list(range(first, min(first + chunk, prompt)))
        yield part, before[len(before) - overlap :] if len(before) > overlap else before, ask_later if before else ask, answer
        before = part


def received(queries, cached, fresh, count, factor=None, norms=None):
    """Of each of the last ``count`` cached keys the largest probability, from queries [G, T, D]; fresh keys are causal.

    Probabilities are multiplied by a ``factor`` [T] of the query and by ``norms`` [G, count]; None: by 1.
    """
    most = np.zeros(count)
    for g, query in enumerate(queries):
        for t in range(len(query)):
            weight = softmax([float(query[t] @ key) / np.sqrt(len(key)) for key in [*cached, *fresh[: t + 1]]])
            counted = weight[len(cached) - count : len(cached)]
            if norms is not None:
                counted = counted * norms[g] * factor[t]
            most = np.maximum(most, counted)
    return most


def keep(score, budget, head_factor, layerwise):
    """Positions that each head of each layer keeps, from the scores of its positions: {position: score} [L][H]."""
    kept = [[set() for _ in layer] for layer in score]
    every = []
    for layer, heads in enumerate(score):
        factor = head_factor[layer] if isinstance(head_factor, tuple) else head_factor
        for head, of in enumerate(heads):
            ranked = sorted((-s, layer, head, i) for i, s in of.items())
            every.append(ranked[: int(factor * budget * (1 + 1e-6))])
    size = len(score[0])
    groups = [every[at : at + size] for at in range(0, len(every), size)] if layerwise else [every]
    for group in groups:
        for _, layer, head, i in sorted(sum(group, []))[: budget * len(group)]:
            kept[layer][head].add(i)
    return kept


def kept(q, k, v, prompt, inv_freq, budget, head_factor, layerwise, num_sink, chunk, overlap, ask, ask_later, answer,
         factor=None, kernel=None):  # fmt: skip
    """The positions of the prompt that each head of each layer keeps; see `run`.

    With a ``kernel`` [L, H, G, D, d] scores count what values write, and ``factor`` [L, T] of the token that asks.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    sinks = range(min(num_sink, prompt))
    score = [[dict.fromkeys(sinks, np.inf) for _ in layer] for layer in k]
    for part, overlapping, ask_first, ask_last in readings(prompt, num_sink, chunk, overlap, ask, ask_later, answer):
        ids = [*ask_first, *overlapping, *ask_last, *part]
        for layer, head in np.ndindex(k.shape[:2]):
            cached = [rotate(k[layer, head, i], i, inv_freq) for i in [*sinks, *part]]
            fresh = [rotate(k[layer, head, x], prompt + j, inv_freq) for j, x in enumerate(ids)]
            queries = [[rotate(one[x], prompt + j, inv_freq) for j, x in enumerate(ids)] for one in q[layer, head]]
            counted = {}
            if kernel is not None:
                norms = [[np.linalg.norm(v[layer, head, i] @ one) for i in part] for one in kernel[layer][head]]
                counted = {"norms": np.array(norms), "factor": [factor[layer][x] for x in ids]}
            most = received(queries, cached, fresh, len(part), **counted)
            score[layer][head] |= dict(zip(part, most, strict=True))
    return keep(score, budget, head_factor, layerwise)


def traces(q, k, v, prompt, inv_freq, held):
    """The traces of all layers whose heads keep the positions ``held`` [L][H]."""
    turned = [rotate_all(x, inv_freq) for x in (q, k)]
    return [keep_once(turned[0][at], turned[1][at], np.asarray(v[at], np.float64), prompt, held[at]) for at in range(len(k))]


def run(q, k, v, prompt, inv_freq, **knobs):
    """The traces of all layers, of q [L, H, G, T, D], k and v [L, H, T, D] before RoPE; token id t is the token at t."""
    return traces(q, k, v, prompt, inv_freq, kept(q, k, v, prompt, inv_freq, **knobs))
