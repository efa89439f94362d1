"""The shape at which `code_select` is timed: PQCache's search at 128K tokens.

A twentieth of the tokens, K, by codes of M parts with C centroids each, and as many of the newest.
"""

from typing import Any

import jax.numpy as jnp

from pallas_kernels.choose.pqcache.code_select import code_bits
from pallas_kernels.formats import bit_codes
from pallas_kernels.formats.shapes import CONTEXT, Sizes, Timed, few, full, integers, normal


def defined(result: Any, n: Sizes) -> Any:
    """Leave out which of the best slots are at the cut: that depends on how sums round."""
    best = jnp.arange(result[0].shape[2]) - n.first
    return jnp.where((best >= 0) & (best < n.K), 0, result[0]), result[1]


TIMED = Timed(
    label="{K} of {S} keys by {bits} bits",
    sizes={"S": CONTEXT, "M": 2, "C": 64, "K": lambda n: n.S // 20, "E": lambda n: n.D // n.M}
    | {"bits": lambda n: code_bits(n.M, n.C), "first": lambda n: max(n.S // 4096, 1)},
    tiny={"S": few, "C": 8},
    arrays={
        "query": normal("B H G D"),
        "centroids": normal("B H M C E", jnp.float32),
        "ids": lambda d: bit_codes.pack(integers("B H S", 1 << d.bits)(d), d.bits),
        "stop": full("B", lambda n: n.S - n.K),
        "length": full("B", "S"),
        "wanted": full("B", "K"),
    },
    options=lambda n: {"first": n.first, "capacity": n.K, "room": n.K},
    reads=lambda n: n.H * n.S * n.bits // 8,
    float32=False,
    defined=defined,
)
