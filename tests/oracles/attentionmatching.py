"""Attention Matching: tokens of the most attention in a second reading, with biases and values fitted to its queries."""

import numpy as np

from tests.oracles.kvzip import keep, readings, received
from tests.oracles.plain import Trace, attend, dense_prompt, rotate, rotate_all

KNOBS = {
    "budget": 12, "head_factor": 1.5, "layerwise": False, "num_sink": 2, "chunk": 7, "overlap": 3,
    "ask": (5, 3), "ask_later": (7,), "answer": (4, 9), "queries": 24, "ridge": 0.01,
}  # fmt: skip
LENGTHS = (1, 2, 3, 9, 13, 40)
LEAST, MOST = np.exp(-3), np.exp(3)  # bounds of a slot's weight


def ridge_towards(columns, target, start, penalty):
    """x with the least |columns x - target|^2 + penalty times the columns' mean square times |x - start|^2."""
    scale = penalty * (columns**2).sum() / columns.shape[1]
    square = columns.T @ columns + scale * np.eye(columns.shape[1])
    return start + np.linalg.solve(square, columns.T @ (target - columns @ start))


def fit(queries, keys, values, kept, ridge):
    """The biases [K] and values [K, D] of the ``kept`` positions, from queries [N, D] and the whole prompt [S, D]."""
    logits = queries @ keys.T / np.sqrt(keys.shape[1])
    mass = np.exp(logits - logits.max(axis=1, keepdims=True))
    whole, columns = mass.sum(axis=1), mass[:, kept]
    weight = np.ones(len(kept))
    largest = np.linalg.eigvalsh(columns.T @ columns)[-1]
    for _ in range(16):
        weight = np.clip(weight - columns.T @ (columns @ weight - whole) / largest, LEAST, MOST)
    share = np.exp(logits[:, kept]) * weight
    share /= share.sum(axis=1, keepdims=True)
    found = (mass / whole[:, None]) @ values
    return np.log(weight), ridge_towards(share, found, values[kept], ridge)


def matched(q, k, v, prompt, inv_freq, budget, head_factor, layerwise, num_sink, chunk, overlap, ask, ask_later, answer,
            queries, ridge):  # fmt: skip
    """For each head of each layer the kept positions, ascending, their biases and values: [L][H]; see `run`."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    sinks, group = range(min(num_sink, prompt)), q.shape[2]
    count = -(-queries // group)
    wanted = sorted({num_sink + j * (prompt - num_sink) // count for j in range(count)}) if prompt > num_sink else []
    score = [[dict.fromkeys(sinks, np.inf) for _ in layer] for layer in k]
    sampled = [[[] for _ in layer] for layer in k]
    cached = [[[rotate(head[i], i, inv_freq) for i in range(prompt)] for head in layer] for layer in k]
    for part, overlapping, ask_first, ask_last in readings(prompt, num_sink, chunk, overlap, ask, ask_later, answer):
        ids = [*ask_first, *overlapping, *ask_last, *part]
        for layer, head in np.ndindex(k.shape[:2]):
            fresh = [rotate(k[layer, head, x], prompt + j, inv_freq) for j, x in enumerate(ids)]
            asking = [[rotate(one[x], prompt + j, inv_freq) for j, x in enumerate(ids)] for one in q[layer, head]]
            most = received(asking, [cached[layer][head][i] for i in [*sinks, *part]], fresh, len(part))
            score[layer][head] |= dict(zip(part, most, strict=True))
            for one in asking:
                sampled[layer][head] += [one[j] for j in range(len(ids) - len(part), len(ids)) if ids[j] in wanted]
    kept = keep(score, budget, head_factor, layerwise)
    found = []
    for layer in range(len(k)):
        found.append([])
        for head, positions in enumerate(map(sorted, kept[layer])):
            bias, value = np.zeros(len(positions)), v[layer, head, positions]
            if sampled[layer][head] and positions:
                keys = np.stack(cached[layer][head])
                bias, value = fit(np.stack(sampled[layer][head]), keys, v[layer, head, :prompt], positions, ridge)
            found[layer].append((positions, bias, value))
    return found


def run(q, k, v, prompt, inv_freq, **knobs):
    """The traces of all layers, of q [L, H, G, T, D], k and v [L, H, T, D] before RoPE; token id t is the token at t."""
    return [
        _trace(rotate_all(q[at], inv_freq), rotate_all(k[at], inv_freq), np.asarray(v[at], np.float64), prompt, heads)
        for at, heads in enumerate(matched(q, k, v, prompt, inv_freq, **knobs))
    ]


def _trace(q, k, v, prompt, heads):
    trace, dim = Trace(prompt=dense_prompt(q, k, v, prompt)), k.shape[2]
    for t in range(prompt, k.shape[1]):
        out, seen = np.zeros((*q.shape[:2], dim)), []
        for h, (positions, bias, value) in enumerate(heads):
            # A bias is the product of one more channel, before the logits are scaled.
            keys = [np.append(k[h, i], b * np.sqrt(dim)) for i, b in zip(positions, bias, strict=True)]
            keys += [np.append(k[h, i], 0) for i in range(prompt, t + 1)]
            for g in range(q.shape[1]):
                query = np.append(q[h, g, t], 1) * np.sqrt((dim + 1) / dim)
                out[h, g], _ = attend(query, keys, [*value, *v[h, prompt : t + 1]])
            seen.append({*positions, *range(prompt, t + 1)})
        trace.add(t, out, seen, seen)
    return trace
