"""PI: Full attention at positions divided by a factor."""

import numpy as np

from tests.oracles.plain import Trace, attend, rotate

KNOBS = {"factor": 3.0}
LENGTHS = (1, 2, 15, 16, 17, 40)


def run(q, k, v, prompt, inv_freq, factor):
    """See the package's docstring."""
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    for t in range(total):
        out = np.zeros((heads, group, dim))
        for h in range(heads):
            keys = [rotate(k[h, i], i / factor, inv_freq) for i in range(t + 1)]
            for g in range(group):
                query = rotate(q[h, g, t], t / factor, inv_freq)
                out[h, g], _ = attend(query, keys, list(np.asarray(v[h, : t + 1], np.float64)))
        trace.add(t, out, [set(range(t + 1))] * heads)
    return trace
