"""The shapes at which `bucket_score` is timed: SOCKET's search at 128K tokens, with L tables of P planes."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import CONTEXT, Sizes, Timed, counted, few, full, integers, normal
from pallas_kernels.formats.sign_codes import BLOCK


def searched_bytes(n: Sizes) -> int:
    """Count the bytes of ids, norms and positions of the searched slots."""
    return n.B * n.H * (n.S - 2 * (n.S // 16)) * (n.L + 2 + 4)


TIMED = Timed(
    label="{L} tables of {S} keys, {B} rows",
    sizes={"S": CONTEXT, "L": 60, "P": 8, "N": lambda n: -(-n.S // BLOCK), "R": lambda n: n.L * BLOCK},
    shapes=({}, {"B": 8}),
    tiny={"S": few, "L": 6, "P": 3},
    arrays={
        "query": normal("B H G D"),
        "planes": normal("L P D", jnp.float32),
        "temperature": full("", 0.3, jnp.float32),
        "ids": integers("B H N R", lambda n: 1 << n.P, jnp.uint8),
        "norm": lambda d: jnp.abs(normal("B H S")(d)),
        "position": counted("B H S"),
        "cursor": full("B", "S"),
    },
    options=lambda n: {"first": n.S // 16, "num_local": n.S // 16},
    reads=searched_bytes,
    tolerance=1e-5,
)
