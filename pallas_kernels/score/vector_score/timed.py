"""The shape at which `vector_score` is timed: the keys of all tokens of a head, for each query head (RetrievalAttention)."""

from pallas_kernels.formats.shapes import CONTEXT, Timed, counted, few, full, normal

TIMED = Timed(
    label="{S} tokens of each query head",
    sizes={"S": CONTEXT},
    tiny={"S": few},
    arrays={"query": normal("B H G D"), "vector": normal("B H S D"), "limit": full("B", "S"), "position": counted("B H S")},
    options=lambda n: {"reduce": "each", "first": 4},
    reads=("vector",),
)
