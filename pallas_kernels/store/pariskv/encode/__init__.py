"""Codes of keys (ParisKV): the sign of every channel, a 4-bit code per channel, and a weight per slice."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward
from pallas_kernels.store.pariskv.encode import pallas_mosaic_gpu, pallas_triton, reference

ENCODE = Operation.of("encode", pallas_triton, pallas_mosaic_gpu, reference)


@declared(ENCODE, derivative=INTEGERS)
def encode(
    key: Annotated[Array, "floating B H T D"],
    valid: Annotated[Array, "bool B H|1 T"],
    signs: Annotated[Array | None, "float32 D"],
    *,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Encode vectors: the cluster of every slice by its signs, 4-bit channels, and a weight per slice.

    The codes of a vector do not depend on the other vectors, nor on how many there are, to the last bit.

    Args:
        key: D a power of two of at least 8.
        valid: other vectors may hold anything, and their codes are zero.
        signs: -1 and 1. Vectors are multiplied by them and by a Hadamard matrix first; None leaves that out.
        scale: factor that the rotation leaves out, 1 / sqrt(D); 1 without a rotation.
        implementation: "pallas_triton" takes D from 16 to 256. Divisions may round differently, so a channel at the edge of
            two levels may get either.

    Returns:
        ids uint8 [B, H, T, N] with N = D / 8: bit j is set if channel j of the slice is >= 0.
        rows uint8 [B, H, T, D], 8 bytes per slice. Four bytes hold two channels each, the even channel in the low bits: bit 3
        is the sign (1 is >= 0), bits 0-2 are the level. Then follows a bfloat16, the length of the slice divided by the
        length of its decoded direction's projection onto it, and two bytes of 0.
    """
    return forward()
