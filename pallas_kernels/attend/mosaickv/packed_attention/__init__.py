"""Attention over listed blocks of packed vectors and a buffer of raw tokens (MosaicKV)."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.mosaickv.packed_attention import pallas_mosaic_gpu, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward

PACKED_ATTENTION = Operation.of("packed_attention", pallas_mosaic_gpu, reference, logits=True)


@declared(PACKED_ATTENTION)
def packed_attention(
    parts: Annotated[Array, "B H M G N D"],
    query: Annotated[Array, "B H G D"],
    key: Annotated[tuple[Array, Array], "B H S _", "B H S _"],
    value: Annotated[tuple[Array, Array], "B H S _", "B H S _"],
    basis: Annotated[Array, "float32 B H M D D"],
    blocks: Annotated[Array, "int32 B H K"],
    count: Annotated[Array, "int32 B H"],
    last: Annotated[Array, "int32 B"],
    recent: Annotated[tuple[Array, Array, Array], "B H R D", "B H R D", "int32 B H R"],
    *,
    scale: float,
    granule: int,
    span: int,
    owner: Annotated[Array | None, "int32 B P"] = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Attend to the tokens of listed packed blocks and all tokens of a raw buffer, under one softmax.

    Block p holds slots ``p * granule`` to ``(p + 1) * granule - 1``. Only the output is projected back onto the model's
    basis, never the cache.

    Args:
        parts: made by `project_query`.
        query: the same queries in the model's basis.
        key: r values and a bitmap of each key, see `packed_score`.
        value: values and bitmaps of the values, as ``key``.
        basis: in which the values are packed.
        blocks: block ids, **ascending** up to ``count``; entries behind it may hold anything.
        count: blocks listed, at most K.
        last: the highest segment, see `packed_score`.
        recent: keys, values and positions of the buffer; a negative position means that the slot holds no token.
        granule: tokens per block.
        span: blocks per segment.
        owner: the segment of every block, ascending; or None.

    Returns:
        [B, H, G, D] in the dtype of the query; zeros for a list without a block and a buffer without a token.
    """
    return forward()
