"""The shapes at which `sparse_attention` is timed: the last 8192 tokens of a prompt of up to 512K tokens.

A query attends to K of the N blocks of 64 in front, near or scattered, and to C columns. The queries are in Q blocks.
"""

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, full, lists, normal

BLOCK = 64

TIMED = Timed(
    label="{T} queries, {K} {blocks} blocks and {C} columns of {S} tokens",
    sizes={"S": CONTEXT, "T": 8192, "blocks": "near", "most": 96, "C": 1000}
    | {"Q": lambda n: n.T // BLOCK, "N": lambda n: (n.S - n.T) // BLOCK, "K": lambda n: min(n.most, n.N)},
    shapes=({}, {"S": 4 * CONTEXT}, {"most": 512, "blocks": "scattered"}),
    tiny={"S": few, "T": 2 * BLOCK, "C": 16},
    arrays={
        "query": normal("B H G T D"),
        "key": normal("B H S D"),
        "value": normal("B H S D"),
        "distances": lists("B H G K", lambda n: n.N if n.blocks == "scattered" else n.K, first=1),
        "first": full("B H G Q", 0),
        "count": full("B H G Q", "K"),
        "columns": lists("B H G C", "S"),
        "num_columns": full("B H G", "C"),
        "start": full("", lambda n: n.S - n.T),
        "length": full("B", "T"),
    },
    options=lambda n: {"block": BLOCK, "scale": n.scale},
    reads=("key", "value"),
)
