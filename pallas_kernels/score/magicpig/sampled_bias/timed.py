"""The shape at which `sampled_bias` is timed: MagicPIG's corrections of a sampled sixteenth, K, of 128K tokens."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, full, lists, normal

TIMED = Timed(
    label="{K} of {S} keys",
    sizes={"S": CONTEXT, "L": 150, "K": lambda n: n.S // 16},
    tiny={"S": few, "L": 20},
    arrays={
        "query": normal("B H G D"),
        "key": normal("B H S D"),
        "centre": full("B H D", 0, jnp.float32),
        "slots": lists("B H K", "S"),
        "own": lambda d: normal("B H G K")(d) > 0,
        "near": full("B", lambda n: n.S - n.S // 1024 - 1),
    },
    options=lambda n: {"first": max(n.S // 32768, 1), "num_tables": n.L, "num_bits": 10},
    reads=lambda n: n.H * n.K * n.D * 2,  # the listed keys
    defined=lambda result, n: jnp.exp(-result),
)
