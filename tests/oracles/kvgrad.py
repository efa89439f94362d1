"""KVgrad: KVzip's attention, times what the value writes, times the gradient of the last hidden states' squares."""

from tests.oracles import kvzip

KNOBS = {**kvzip.KNOBS, "chunk": 9}
LENGTHS = kvzip.LENGTHS


def kept(q, k, v, prompt, inv_freq, gradient, kernel, **knobs):
    """The positions that each head of each layer keeps, by norms ``gradient`` [L, T] and a ``kernel`` [L, H, G, D, d]."""
    return kvzip.kept(q, k, v, prompt, inv_freq, factor=gradient, kernel=kernel, **knobs)


def run(q, k, v, prompt, inv_freq, **knobs):
    """The traces of all layers; ``knobs`` are those of `kept`."""
    return kvzip.traces(q, k, v, prompt, inv_freq, kept(q, k, v, prompt, inv_freq, **knobs))
