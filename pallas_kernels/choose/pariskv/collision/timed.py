"""The shape at which `collision` is timed: ParisKV's first stage at 128K tokens.

Of the N keys of a long zone a tenth, K, become candidates. A key has ids of M slices of its channels.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import CONTEXT, Drawing, Sizes, Timed, counted, few, full, integers, normal

SHARES = (2**31 - 1, 100_000, 10_000, 30_000, 60_000, 100_000, 150_000, 200_000)  # ParisKV's shares for a long zone


def counts(d: Drawing) -> Array:
    """Count the ids of each slice in the zone: int32 [B, H, M, 256]."""
    zone = d.arrays["ids"][:, :, d.first : d.first + d.N].swapaxes(2, 3).reshape(-1, d.N)
    counts = jax.vmap(functools.partial(jnp.bincount, length=256))(zone)
    return counts.reshape(*d.along("B H M"), 256).astype(jnp.int32)


def defined(result: Any, n: Sizes) -> Any:
    """Leave out what is behind the end of a list."""
    query, slots, count = result
    return query, jnp.where(jnp.arange(n.K)[None, None] < count[..., None], slots, 0), count


TIMED = Timed(
    label="{K} of {S} keys",
    sizes={"S": CONTEXT, "first": lambda n: n.S // 16, "N": lambda n: n.S - 2 * n.first}
    | {"K": lambda n: math.ceil(n.N / 10), "M": lambda n: n.D // 8},
    tiny={"S": few},
    arrays={
        "query": normal("B H G D"),
        "signs": full("D", 1, jnp.float32),
        "ids": integers("B H S M", 256, jnp.uint8),
        "counts": counts,
        "position": counted("B H S"),
        "stop": full("B", lambda n: n.S - n.first),
        "shares": lambda d: jnp.asarray([SHARES], jnp.int32),
    },
    options=lambda n: {"first": n.first, "capacity": n.K},
    reads=lambda n: n.H * n.N * n.M,  # the zone's ids
    tolerance=1e-5,
    defined=defined,
)
