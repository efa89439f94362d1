"""Codes of keys (ParisKV): the sign of every channel, a 4-bit code per channel, and a weight per slice."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.store.encode import pallas_triton, reference

__all__ = ["ENCODE", "encode"]

ENCODE = Operation(
    "encode",
    {
        "pallas_triton": Implementation(pallas_triton.encode, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.encode),
    },
)


def encode(
    key: Array,
    valid: Array,
    signs: Array | None,
    *,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Encode vectors: the cluster of every slice by its signs, 4-bit channels, and a weight per slice.

    The codes of a vector do not depend on the other vectors, nor on how many there are, to the last bit.

    Not differentiable: its results are integers and truth values.

    Args:
        key: [B, H, T, D], any float dtype, D a power of two of at least 8.
        valid: bool [B, H or 1, T]; other vectors may hold anything, and their codes are zero.
        signs: float32 [D] of -1 and 1. Vectors are multiplied by them and by a Hadamard matrix first; None leaves that out.
        scale: factor that the rotation leaves out, 1 / sqrt(D); 1 without a rotation.
        implementation: "pallas_triton" (GPU, D from 16 to 256), "xla", or None for the first that runs. Their divisions
            may round differently, so a channel at the edge of two levels may get either.
        platform: see ``Operation.run``.

    Returns:
        ids uint8 [B, H, T, N] with N = D / 8: bit j is set if channel j of the slice is >= 0.
        rows uint8 [B, H, T, D], 8 bytes per slice. Four bytes hold two channels each, the even channel in the low bits: bit 3
        is the sign (1 is >= 0), bits 0-2 are the level. Then follows a bfloat16, the length of the slice divided by the
        length of its decoded direction's projection onto it, and two bytes of 0.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, tokens, dim = key.shape
    if valid.shape not in ((batch, heads, tokens), (batch, 1, tokens)) or valid.dtype != jnp.bool_:
        raise ValueError(
            f"encode: got valid {valid.dtype} {valid.shape} for key {key.shape}, expected bool [B, H or 1, T]"
        )
    if signs is not None and (signs.shape != (dim,) or signs.dtype != jnp.float32):
        raise ValueError(f"encode: got signs {signs.dtype} {signs.shape} for key {key.shape}, expected float32 [D]")
    return ENCODE.run(key, valid, signs, scale=scale, implementation=implementation, platform=platform)
