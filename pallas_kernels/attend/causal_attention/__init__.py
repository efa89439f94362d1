"""Causal self-attention of whole sequences at positions 0..T-1: prompts of one chunk."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.causal_attention import cudnn, pallas_mosaic_gpu, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward

CAUSAL_ATTENTION = Operation.of("causal_attention", pallas_mosaic_gpu, cudnn, reference, logits=True)


@declared(CAUSAL_ATTENTION, derivative="through ``pallas_mosaic_gpu`` and ``cudnn`` and ``xla``")
def causal_attention(
    query: Annotated[Array, "B H G T D"],
    key: Annotated[Array, "like query B H T D"],
    value: Annotated[Array, "like key"],
    *,
    scale: float | None = None,
    window: Annotated[int | None, ">=1"] = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Attend causally to whole sequences at positions 0..T-1.

    Right padding is harmless: a token never sees a later one.

    Args:
        query: already rotated; float32, bfloat16 or float16.
        key: already rotated.
        scale: factor of the logits; None means 1 / sqrt(D).
        window: the most tokens that a token sees, itself included: the newest; None means all before it.
        implementation: "pallas_mosaic_gpu" and "cudnn" are flash attention, for bfloat16 or float16; the first on a Hopper
            GPU, for D of 64 or 128, without a window.

    Returns:
        [B, H, G, T, D] in the dtype of the query.
    """
    if window is not None and window >= query.shape[3]:
        window = None
    return forward(window=window, scale=query.shape[-1] ** -0.5 if scale is None else scale)
