"""Attention of a prompt chunk over the tokens stored before it: every query sees all of the first slots of its row."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.past_attention import cudnn, pallas_mosaic_gpu, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import LOOP, declared, forward

PAST_ATTENTION = Operation.of("past_attention", pallas_mosaic_gpu, cudnn, reference, logits=True)


@declared(PAST_ATTENTION, derivative=LOOP)
def past_attention(
    query: Annotated[Array, "B H G T D"],
    key: Annotated[Array, "like query B H S D"],
    value: Annotated[Array, "like key"],
    *,
    count: Annotated[Array, "int32 B"],
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Attend with T queries to the first slots of a cache, which all hold a token.

    It is the part of ``prefix_attention`` before the chunk, for a chunk whose own tokens are not in this cache.

    Args:
        query: already rotated; float32, bfloat16 or float16.
        count: in [0, S], the slots that the row's queries see; other slots may hold any finite value.
        implementation: "pallas_mosaic_gpu" and "cudnn" are flash attention, for bfloat16 or float16; the first on a Hopper
            GPU, for D of 64 or 128 and S a multiple of 8.

    Returns:
        out [B, H, G, T, D] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax denominator; 0
        and -inf in a row that sees no slot.
    """
    return forward()
