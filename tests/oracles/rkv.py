"""RKV: importance less redundancy, at the prompt's end and again after every ``interval`` tokens."""

import numpy as np

from tests.oracles.plain import best, keep_again, rotate_all, softmax

KNOBS = {"budget": 12, "interval": 3, "obs_window": 4, "kernel": 3, "mix": 0.4, "threshold": 0.3}
LENGTHS = (1, 4, 5, 6, 11, 12, 13, 40)


def redundancy(keys, threshold):
    """The softmax over the tokens of their mean cosine with the others, for keys [n, D]."""
    count = len(keys)
    mean = np.zeros(count)
    for i in range(count):
        cosine = np.zeros(count)
        for j in range(count):
            if i != j:
                cosine[j] = keys[i] @ keys[j] / (np.linalg.norm(keys[i]) + 1e-8) / (np.linalg.norm(keys[j]) + 1e-8)
        cosine[max([j for j in range(count) if cosine[j] > threshold], default=0)] = 0
        mean += cosine / count
    return softmax(mean)


def keep(q, k, tokens, **knobs):
    """Which of its ``tokens``, a list for each, every KV head keeps, from rotated q and k."""
    return [keep_in_head(q, k, h, tokens[h], **knobs) for h in range(len(k))]


def keep_in_head(q, k, h, tokens, budget, obs_window, kernel, mix, threshold):
    """Which of ``tokens`` KV head ``h`` keeps; the last of them are the window."""
    if len(tokens) <= budget:
        return set(tokens)
    prefix, window = tokens[:-obs_window], tokens[-obs_window:]
    received = np.zeros(len(prefix))
    for t in window:
        logits = [max(float(query @ k[h, i]) for query in q[h, :, t]) / np.sqrt(k.shape[2]) for i in prefix]
        received += softmax(logits) / obs_window
    repeated = redundancy([k[h, i] for i in tokens], threshold)
    score = {}
    for at, i in enumerate(prefix):
        around = received[max(at - kernel // 2, 0) : at + kernel // 2 + 1]
        score[i] = mix * max(around) - (1 - mix) * repeated[at]
    return best(score, budget - obs_window) | set(window)


def run(q, k, v, prompt, inv_freq, interval, **knobs):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    kept = keep(q, k, [list(range(prompt))] * len(k), **knobs)
    return keep_again(q, k, v, prompt, interval, kept, lambda tokens, t: keep(q, k, tokens, **knobs))
