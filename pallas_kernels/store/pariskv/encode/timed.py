"""The shape at which `encode` is timed: ParisKV's codes of a prompt of 128K tokens."""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.formats.shapes import CONTEXT, Sizes, Timed, few, full, normal


def defined(result: Any, n: Sizes) -> Any:
    """Make floats of the codes: at the edge of a level, rounding decides on which side a channel falls."""
    return result[0], *(x.astype(jnp.float32) for x in result[1:])


TIMED = Timed(
    label="{S} keys",
    sizes={"S": CONTEXT},
    tiny={"S": few},
    arrays={
        "key": normal("B H S D"),
        "valid": full("B H S", True, bool),
        "signs": lambda d: d.random.rademacher(next(d.keys), (d.D,), jnp.float32),
    },
    options=lambda n: {"scale": n.scale},
    reads=("key",),
    chained=None,
    defined=defined,
)
