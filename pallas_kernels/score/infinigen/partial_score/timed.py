"""The shape at which `partial_score` is timed: InfiniGen's search at 128K tokens by a fifth of the channels, C."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import CONTEXT, Timed, counted, few, full, normal

TIMED = Timed(
    label="{C} channels of {S} keys",
    sizes={"S": CONTEXT, "C": lambda n: n.D // 5},
    tiny={"S": few},
    arrays={
        "query": normal("B H G C"),
        "key": normal("B H C S"),
        "position": counted("B H S"),
        "cursor": full("B", "S"),
        "alpha": full("", 4, jnp.float32),
    },
    options=lambda n: {"scale": n.scale},
    reads=("key", "position"),
    # Rounding decides whether a logit at the edge is near. The score of the newest token is inf.
    defined=lambda result, n: (jnp.where(jnp.isfinite(result[0]), result[0], 0), result[2]),
)
