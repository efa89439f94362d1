"""Attention of a prompt chunk over a cache without holes: its own tokens causally, all slots before them fully."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.prefix_attention import cudnn, pallas_mosaic_gpu, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import LOOP, declared, forward

PREFIX_ATTENTION = Operation.of("prefix_attention", pallas_mosaic_gpu, cudnn, reference, logits=True)


@declared(PREFIX_ATTENTION, derivative=LOOP)
def prefix_attention(
    query: Annotated[Array, "B H G T D"],
    key: Annotated[Array, "like query B H S>=T D"],
    value: Annotated[Array, "like key"],
    *,
    start: Annotated[Array | int, "int32 [] or B"],
    length: Annotated[Array | None, "int32 B"] = None,
    scale: float,
    threshold: Annotated[Array | None, "float32 B H G"] = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Attend with T tokens in slots start..start+T-1 to a cache in which every slot before them holds a token.

    Token t sees slots 0..start+t. Slots behind the chunk may hold any finite value. Training uses ``causal_attention``.

    Args:
        query: already rotated; float32, bfloat16 or float16.
        key: the chunk's own keys are stored in it already.
        start: may be traced: the slot of the chunk's first token. If it is a scalar, all T tokens of the chunk lie in the
            cache; if it is [B], all real ones do. The Python int 0 leaves out the pass over earlier slots.
        length: how many tokens of the chunk are real; padding may hold anything, NaN included. None means that all T are
            real.
        threshold: at least 0. Each 64 queries of a head, counted from the chunk's start, read blocks of 192 slots, the last
            one first, but skip one in which each query's largest logit is further below its largest one so far. The first
            block is always read. None and infinity skip nothing.
        implementation: "pallas_mosaic_gpu" and "cudnn" are flash attention, for bfloat16 or float16; the first on a Hopper
            GPU, for D of 64 or 128 and S a multiple of 8.

    Returns:
        out [B, H, G, T, D] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax
        denominator; 0 and -inf for a query that is not real.
    """
    return forward()
