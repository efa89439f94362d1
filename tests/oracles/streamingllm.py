"""StreamingLLM, token by token: a list of slots, keys un-rotated, each rotated at its slot, the middle dropped.

The list holds the first s tokens and the last w, s + w = budget. A token is appended, attends to the whole list with
its query rotated at its own slot, and then the list is cut back to s + w.
"""

import numpy as np

from tests.oracles.plain import Trace, attend, rotate

KNOBS = {"budget": 12, "num_sink": 3, "chunk": 5}
LENGTHS = (1, 3, 4, 11, 12, 13, 14, 40)


def run(q, k, v, prompt, inv_freq, budget, num_sink, chunk):
    """See the package's docstring; ``chunk`` must not matter."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    heads, group, total, dim = q.shape
    trace = Trace(prompt=np.zeros((heads, group, prompt, dim)))
    slots: list[int] = []
    for t in range(total):
        slots.append(t)
        out = np.zeros((heads, group, dim))
        for h in range(heads):
            keys = [rotate(k[h, token], slot, inv_freq) for slot, token in enumerate(slots)]
            for g in range(group):
                query = rotate(q[h, g, t], len(slots) - 1, inv_freq)
                out[h, g], _ = attend(query, keys, [v[h, token] for token in slots])
        attended = set(slots)
        if len(slots) > budget:
            slots = slots[:num_sink] + slots[len(slots) - (budget - num_sink) :]
        trace.add(t, out, [attended] * heads, [set(slots)] * heads)
    return trace
