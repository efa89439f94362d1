"""The shapes at which `token_vote` is timed: a decode step of TokenSelect at up to 1M tokens."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, full, normal

TIMED = Timed(
    label="{S} tokens", sizes={"S": CONTEXT}, shapes=({}, {"S": 8 * CONTEXT}), tiny={"S": few},
    arrays={"query": lambda d: normal("B H G D")(d).astype(jnp.float32), "key": normal("B H S D"), "stop": full("B", "S")},
    options=lambda n: {"start": 0}, reads=("key",), tolerance=1e-3,
)  # fmt: skip
