"""The shape at which `rerank` is timed: ParisKV's second stage at 128K tokens.

The K candidates are a tenth of the N keys of a long zone.
"""

import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels.choose.pariskv.rerank import Regions
from pallas_kernels.formats.key_codes import rows
from pallas_kernels.formats.shapes import CONTEXT, Drawing, Timed, counted, few, full, integers, lists, normal


def key_rows(d: Drawing) -> Any:
    """Draw the codes and the weights of all keys."""
    return rows(integers("B H S C", 256, jnp.uint8)(d), jnp.abs(normal("B H S M", jnp.bfloat16)(d)))


TIMED = Timed(
    label="{regions.best} of {K} candidates of {S} keys",
    sizes={"S": CONTEXT, "regions": Regions(sinks=64, best=100, tail=768, size=1999)}
    | {"first": lambda n: n.S // 16, "N": lambda n: n.S - 2 * n.first, "K": lambda n: math.ceil(n.N / 10)}
    | {"C": lambda n: n.D // 2, "M": lambda n: n.D // 8},
    tiny={"S": few, "regions": Regions(sinks=16, best=8, tail=8, size=32)},
    arrays={
        "query": normal("B H D", jnp.float32),
        "slots": lists("B H K", "N", "first"),
        "count": full("B H", "K"),
        "rows": key_rows,
        "position": counted("B H S"),
        "cursor": full("B", "S"),
        "stop": full("B", lambda n: n.S - n.first),
    },
    options=lambda n: {"budget": n.regions.best, "enough": 1, "regions": n.regions, "scale": 1e-4},
    reads=lambda n: n.H * n.K * (n.D + 4),
    float32=False,
    defined=lambda result, n: jnp.sort(jnp.where(result[1], result[0], -1), axis=-1),
)
