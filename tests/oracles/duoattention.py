"""DuoAttention: heads with low scores keep both ends of the prompt; here it is the first layer of two."""

import numpy as np

from tests.oracles.plain import keep_once, rotate_all

KNOBS = {"sparsity": 0.5, "num_sink": 3, "num_recent": 6, "scores": ((1.0, 4.0), (2.0, 1.0))}
LENGTHS = (1, 3, 6, 8, 9, 10, 11, 40)


def streaming(scores, sparsity):
    """The (layer, head) of the heads with the lowest scores; among equals the earlier comes first."""
    heads = [(score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)]
    return {(layer, head) for _, layer, head in sorted(heads)[: round(len(heads) * sparsity)]}


def run(q, k, v, prompt, inv_freq, sparsity, num_sink, num_recent, scores):
    """See the package's docstring."""
    q, k, v = rotate_all(q, inv_freq), rotate_all(k, inv_freq), np.asarray(v, np.float64)
    stream = streaming(scores, sparsity)
    ends = {i for i in range(prompt) if i < num_sink or i >= prompt - num_recent}
    return keep_once(q, k, v, prompt, [ends if (0, h) in stream else set(range(prompt)) for h in range(len(k))])
