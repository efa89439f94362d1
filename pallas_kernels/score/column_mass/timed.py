"""The shape at which `column_mass` is timed: a cache of H2O with 1,024 tokens and the newest token."""

import math

import jax.numpy as jnp

from pallas_kernels.formats.shapes import Timed, counted, full, normal

TIMED = Timed(
    label="one query, {S} tokens, 1 row",
    sizes={"S": 1025, "T": 1},
    tiny={"S": 17},
    arrays={
        "query": normal("B H G T D"),
        "key": normal("B H S D"),
        "lse": full("B H G T", lambda n: math.log(n.S), jnp.float32),
        "query_position": full("B T", "S"),
        "key_position": counted("B H S"),
    },
    options=lambda n: {"scale": n.scale},
    reads=("key", "key_position"),
)
