"""The shape at which `partial_select` is timed: InfiniGen's K best at 128K tokens by a fifth of the channels, C."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import CONTEXT, Timed, counted, few, full, normal


def alone(x: Array) -> Array:
    """Return the sum over one device."""
    return x


TIMED = Timed(
    label="{K} of {S} keys by {C} channels",
    sizes={"S": CONTEXT, "K": 1024, "C": lambda n: n.D // 5},
    tiny={"S": few, "K": few},
    arrays={
        "query": normal("B H G C"),
        "key": normal("B H C S"),
        "position": counted("B H S"),
        "cursor": full("B", "S"),
        "alpha": full("", 4, jnp.float32),
        "budget": full("", "K"),
    },
    options=lambda n: {"scale": n.scale, "capacity": n.K + 1, "total": alone, "query_heads": n.H * n.G},
    reads=("key", "position"),
    defined=lambda result, n: result[1],  # rounding decides between scores at the cut
)
