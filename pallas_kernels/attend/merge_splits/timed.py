"""The shape at which `merge_splits` is timed: the N parts of a decode step."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import Timed, normal

TIMED = Timed(
    label="{N} parts, {H} lists",
    sizes={"N": 32},
    tiny={},
    arrays={"out": normal("H N G D", jnp.float32), "lse": normal("H N G", jnp.float32)},
    reads=("out", "lse"),
    chained="out",
    tolerance=1e-4,
)
