"""The shapes at which `kth_select` is timed: budgets K of retrieval at up to 1M slots."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import CONTEXT, Timed, few, normal

TIMED = Timed(
    label="{K} of [{H}, {S}]", sizes={"S": CONTEXT, "K": 2048},
    shapes=({}, {"S": 8 * CONTEXT}, {"H": 1}, {"S": 8192, "K": 128}), tiny={"S": few, "K": few},
    arrays={"score": normal("B H S", jnp.float32)}, options=lambda n: {"budget": n.K, "capacity": n.K}, reads=("score",),
    chained="score",
)  # fmt: skip
