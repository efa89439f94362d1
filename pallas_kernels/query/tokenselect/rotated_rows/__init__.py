"""Keys and values of listed tokens side by side, the keys rotated (TokenSelect)."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.query.tokenselect.rotated_rows import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.signature import declared, forward

ROTATED_ROWS = Operation.of("rotated_rows", pallas_triton, pallas_mosaic_gpu, reference)


@declared(ROTATED_ROWS)
def rotated_rows(
    key: Annotated[Array | Quantised, "B H S D"],
    value: Annotated[Array | Quantised, "like key"],
    token: Annotated[Array, "int32 B E"],
    inv_freq: Annotated[Array, "float32 D/2"],
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Gather listed keys and values, and rotate the key of entry j at place j.

    Args:
        key: keys or codes.
        value: values or codes; in device memory or in pinned host memory, scales in device memory.
        token: listed slots in [0, S), the same for all heads.
        inv_freq: radians per place.
        implementation: "pallas_triton" takes D a power of two.

    Returns:
        key [B, H, E, D], rotated in float32 and rounded to its dtype, and value [B, H, E, D].
    """
    return forward(inv_freq=jnp.asarray(inv_freq))
