"""TriAttention: cosines of the mean query and each key at later distances, at the prompt's end and after every interval."""

import numpy as np

from tests.oracles.plain import best, keep_again, rotate_all

KNOBS = {"budget": 12, "interval": 3, "reach": 70}
LENGTHS = (1, 4, 11, 12, 13, 40)


def pairs(x):
    """The complex number of each pair of channels: [..., D] to [..., D/2]."""
    half = x.shape[-1] // 2
    return x[..., :half] + 1j * x[..., half:]


def keep(q, k, tokens, now, inv_freq, budget, reach):
    """Which of its ``tokens``, a list for each, every KV head keeps before position ``now``, from q and k before rotation."""
    kept = []
    for h, own in enumerate(tokens):
        score = np.full(len(own), -np.inf)
        for g in range(q.shape[1]):
            asked = [pairs(q[h, g, t]) for t in range(now)]
            mean, length = sum(asked) / now, sum(abs(x) for x in asked) / now
            found = np.zeros(len(own))
            offsets = [2**n for n in range(40) if 2**n <= reach]
            for at, i in enumerate(own):
                key = pairs(k[h, i])
                for f, speed in enumerate(inv_freq):
                    phase = np.angle(mean[f]) - np.angle(key[f])
                    for offset in offsets:
                        turned = np.cos(float(speed) * (now - i + offset) + phase)
                        found[at] += abs(mean[f]) * abs(key[f]) * turned / len(offsets)
                    found[at] += (length[f] - abs(mean[f])) * abs(key[f])
            score = np.maximum(score, (found - found.mean()) / max(found.std(), 1e-6))
        kept.append(best(dict(zip(own, score, strict=True)), budget))
    return kept


def run(q, k, v, prompt, inv_freq, interval, **knobs):
    """See the package's docstring."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))

    def again(tokens, t):
        return keep(q, k, tokens, t + 1, inv_freq, **knobs)

    kept = again([list(range(prompt))] * len(k), prompt - 1)
    return keep_again(rotate_all(q, inv_freq), rotate_all(k, inv_freq), v, prompt, interval, kept, again)
