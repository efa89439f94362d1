"""Packs one token of a buffer, and the mean of a block that it fills, into a store of packed vectors (MosaicKV)."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.mosaickv.pack_token import pallas_mosaic_gpu, reference

PACK_TOKEN = Operation.of("pack_token", pallas_mosaic_gpu, reference, in_place=True)


@declared(PACK_TOKEN, derivative="through ``xla``, the values only")
def pack_token(
    key: Annotated[Array, "B H R D"],
    value: Annotated[Array, "B H R D"],
    stored: Annotated[Array, "int32 B H R"],
    place: Annotated[Array, "int32 B"],
    packed: Annotated[Array, "int32 B"],
    last: Annotated[Array, "int32 B"],
    basis_key: Annotated[Array, "float32 B H M D D"],
    basis_value: Annotated[Array, "float32 B H M D D"],
    store: Annotated[tuple[Array, ...], "B H S _", "B H S _", "B H S _", "B H S _", "B H P _", "B H P _"],
    *,
    granule: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, ...]:
    """Pack one token of a buffer, and the mean of a block that it fills, into a store; in place where the caller gives it up.

    The r channels of the largest size are kept, and of equal channels the lower one.

    Args:
        key: keys of the buffer; its slot i holds the token at position ``packed + i``.
        value: values of the buffer.
        stored: positions of the buffer's tokens; negative for an empty slot, which counts as zero.
        place: position of the token to pack; negative for a row without one.
        packed: tokens in front of the buffer, a multiple of ``granule``.
        last: the segment in whose basis the token is packed.
        basis_key: basis of keys and block means.
        basis_value: basis of values.
        store: values [B, H, S, r] and bitmap int32 [B, H, S, D/32] of the keys; the same of the values; and of the block
            means. Slot i is position i, and block p begins at ``p * granule``. A position past the end is dropped.
        granule: tokens per block.

    Returns:
        The six arrays of ``store``.
    """
    return forward()
