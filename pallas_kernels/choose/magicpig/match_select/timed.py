"""The shape at which `match_select` is timed: MagicPIG's sampling at 128K tokens.

A sixteenth of the tokens, K, by their buckets in L tables of 10 bits; R newest slots.
"""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, full, integers

BUCKETS = 100  # a tenth of what 10 bits allow: some tokens are sampled and not all

TIMED = Timed(
    label="{K} of {S} keys by {L} tables",
    sizes={"S": CONTEXT, "L": 150, "R": lambda n: n.S // 1024 + 1, "K": lambda n: n.S // 16},
    tiny={"S": few, "L": 20},
    arrays={
        "query": integers("B H G L", BUCKETS, jnp.uint16),
        "ids": integers("B H L S", BUCKETS, jnp.uint16),
        "near": full("B", lambda n: n.S - n.R),
        "length": full("B", "S"),
    },
    options=lambda n: {"first": max(n.S // 32768, 1), "capacity": n.K, "room": n.R, "num_bits": 10},
    reads=("ids",),
    chained=None,
)
