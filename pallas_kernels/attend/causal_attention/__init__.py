"""Causal self-attention of whole sequences at positions 0..T-1, which training uses."""

from __future__ import annotations

import jax

from pallas_kernels._cudnn import check
from pallas_kernels.attend.causal_attention import cudnn, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["CAUSAL_ATTENTION", "causal_attention"]

CAUSAL_ATTENTION = Operation(
    "causal_attention",
    {
        "cudnn": Implementation(cudnn.causal_attention, ("gpu",), check),
        "xla": Implementation(reference.causal_attention),
    },
    logits=True,
)


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Attend causally to whole sequences at positions 0..T-1.

    Right padding is harmless: a token never sees a later one. ``CAUSAL_ATTENTION.resolve`` tells which implementation a call
    uses.

    Differentiable: through ``cudnn`` and ``xla``.

    Args:
        query: [B, H, G, T, D], already rotated; float32, bfloat16 or float16.
        key: [B, H, T, D], already rotated, same dtype.
        value: [B, H, T, D], same dtype.
        scale: factor of the logits; None means 1 / sqrt(D).
        window: the most tokens that a token sees, itself included: the newest; None means all before it.
        implementation: "cudnn" (flash attention; GPU, bfloat16 or float16), "xla" (float32 softmax), or None.
        platform: see ``Operation.run``.

    Returns:
        [B, H, G, T, D] in the dtype of the query.

    Raises:
        ValueError: shapes or dtypes disagree, the window is below 1, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    expected = (*query.shape[:2], *query.shape[3:])
    if query.ndim != 5 or key.shape != expected or value.shape != expected:
        raise ValueError(
            f"causal_attention: got query {query.shape}, key {key.shape}, value {value.shape}, "
            "expected [B, H, G, T, D], [B, H, T, D], [B, H, T, D]"
        )
    if not query.dtype == key.dtype == value.dtype:
        dtypes = [str(x.dtype) for x in (query, key, value)]
        raise ValueError(f"causal_attention: got dtypes {dtypes}, expected the same dtype")
    if window is not None and window < 1:
        raise ValueError(f"causal_attention: got window={window}, expected at least 1 token or None")
    if window is not None and window >= query.shape[3]:
        window = None
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return CAUSAL_ATTENTION.run(
        query, key, value, scale=scale, window=window, implementation=implementation, platform=platform
    )
