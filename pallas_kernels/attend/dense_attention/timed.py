"""The shapes at which `dense_attention` is timed: chunks of a prompt over a cache that keeps a bounded number of tokens.

A chunk of T tokens is the last of the S tokens in the cache. A query sees W tokens, itself included; None: all before it.
"""

from pallas_kernels.formats.shapes import Timed, counted, normal

TIMED = Timed(
    label=lambda n: f"{n.T} queries, {n.S} tokens{'' if n.W is None else f', a window of {n.W}'}",
    sizes={"W": None},
    shapes=({"T": 128, "S": 2176}, {"T": 512, "S": 4607, "W": 4096}),
    tiny={"T": lambda T: T // 64 + 1, "S": lambda S: S // 64, "W": lambda W: W and W // 64},
    arrays={
        "query": normal("B H G T D"),
        "key": normal("B H S D"),
        "value": normal("B H S D"),
        "query_position": counted("B T", lambda n: n.S - n.T),
        "key_position": counted("B H S"),
        "query_first": lambda d: None if d.W is None else d.arrays["query_position"] - (d.W - 1),
    },
    options=lambda n: {"scale": n.scale},
    reads=("key", "value"),
)
