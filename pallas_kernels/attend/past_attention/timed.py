"""The shape at which `past_attention` is timed: T tokens of a prefill, which see all 128K tokens S of the cache."""

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, full, normal

TIMED = Timed(
    label="{T} queries over {S} tokens",
    sizes={"T": 8192, "S": CONTEXT},
    tiny={"T": lambda T: T // 64, "S": few},
    arrays={"query": normal("B H G T D"), "key": normal("B H S D"), "value": normal("B H S D"), "count": full("B", "S")},
    options=lambda n: {"scale": n.scale},
    reads=("key", "value"),
)
