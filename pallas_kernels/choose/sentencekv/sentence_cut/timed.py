"""The shape at which `sentence_cut` is timed: a decode step of SentenceKV with half of its slots, K.

A row has N sentences of 16 tokens.
"""

import jax.numpy as jnp

from pallas_kernels.choose.sentencekv.sentence_cut import JOINS, Rules
from pallas_kernels.formats.shapes import Timed, counted, full, normal

TIMED = Timed(
    label="{K} of {S} slots, {N} sentences",
    sizes={"S": 2112, "rules": Rules(sinks=32, recent=32, open_cap=256, whole=0)}
    | {"K": lambda n: n.S // 2, "N": lambda n: n.S // 16},
    tiny={"S": 80, "rules": Rules(sinks=4, recent=4, open_cap=8, whole=0)},
    arrays={
        "score": normal("B H N", jnp.float32),
        "sentence": lambda d: counted("B H S")(d) // 16,
        "position": counted("B H S"),
        "count": full("B H", "N"),
        "length": full("B H", 3),
        "cursor": full("B", "S"),
        "event": full("B", JOINS),
    },
    options=lambda n: {"budget": n.K, "rules": n.rules},
    reads=("score", "sentence", "position"),
    chained="score",
)
