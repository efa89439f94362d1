"""The shapes at which `prefix_attention` is timed: T tokens of a prefill after up to 1M tokens P in the cache of S."""

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, full, normal

TIMED = Timed(
    label="{T} queries after {P} tokens",
    sizes={"T": 512, "P": CONTEXT, "S": lambda n: n.P + n.T},
    shapes=({}, {"P": 8 * CONTEXT}, {"T": 8192}),
    tiny={"T": lambda T: T // 64, "P": few},
    arrays={
        "query": normal("B H G T D"),
        "key": normal("B H S D"),
        "value": normal("B H S D"),
        "start": full("", "P"),
        "length": full("B", "T"),
    },
    options=lambda n: {"scale": n.scale},
    reads=("key", "value"),
)
