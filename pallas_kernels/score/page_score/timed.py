"""The shapes at which `page_score` is timed: the bounds of Quest's N pages of a head."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import Timed, few, full, normal

TIMED = Timed(
    label="bounds of {N} pages",
    sizes={"N": 8192},
    shapes=({}, {"N": 65536}),
    tiny={"N": few},
    arrays={
        "query": normal("B H G D"),
        "low": normal("B H N D"),
        "high": lambda d: d.arrays["low"] + jnp.abs(normal("B H N D")(d)),
        "limit": full("B", "N"),
    },
    reads=("low", "high"),
)
