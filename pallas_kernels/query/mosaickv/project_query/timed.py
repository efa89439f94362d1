"""The shape at which `project_query` is timed: a decode step of MosaicKV with P bases of a head."""

import jax.numpy as jnp

from pallas_kernels.formats.shapes import Timed, normal, orthogonal

TIMED = Timed(
    label="{P} segments",
    sizes={"P": 2},
    tiny={},
    arrays={"query": normal("B H G D"), "basis": orthogonal("B H P D D")},
    options=lambda n: {"dtype": n.dtype},
    reads=("basis",),
    float32=False,
    defined=lambda result, n: result.astype(jnp.float32).sum(axis=-2),  # the sum of the terms of each query
)
