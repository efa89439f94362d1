"""Decode attention over index lists: one list of cache slots per (row, KV head)."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.gather_attention import pallas_triton, reference
from pallas_kernels.numerics import merge_partials

__all__ = ["GATHER_ATTENTION", "gather_attention", "merge_partials"]

GATHER_ATTENTION = Operation(
    "gather_attention",
    {
        "pallas_triton": Implementation(pallas_triton.gather_attention, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.gather_attention),
    },
)


def gather_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    slots: jax.Array,
    mask: jax.Array,
    *,
    scale: float,
    bias: jax.Array | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of one query per head over the listed slots only; softmax in float32.

    Rows that are not listed, or listed and masked, never enter, whatever they hold (NaN included). A slot
    listed twice counts twice. Not differentiable on every implementation.

    Args:
        query: [B, H, G, D].
        key: [B, H, S, D], same dtype.
        value: [B, H, S, D], same dtype.
        slots: int32 [B, H, K], each in [0, S) where ``mask`` holds; clamped to that range where it does not
            reach it.
        mask: bool [B, H, K]; False entries of ``slots`` may hold anything.
        scale: factor of the logits, a Python number.
        bias: float32 [B, H, K] added to the scaled logits of all G query heads, or None.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``. ``GATHER_ATTENTION.resolve`` tells which implementation a call uses.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax
        denominator; 0 and -inf for a list without a true mask entry. Parts over disjoint lists join by
        ``merge_partials``.

    Raises:
        ValueError: shapes or the dtypes of slots, mask and bias disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    rows_of = (*query.shape[:2], key.shape[2] if key.ndim == 4 else -1, query.shape[-1])
    lists = (*query.shape[:2], slots.shape[-1])
    others = (slots, mask) if bias is None else (slots, mask, bias)
    agree = query.ndim == 4 and key.shape == value.shape == rows_of and all(x.shape == lists for x in others)
    if not agree:
        raise ValueError(
            f"gather_attention: got query {query.shape}, key {key.shape}, value {value.shape}, "
            f"slots, mask (and bias) {[x.shape for x in others]}, "
            "expected [B, H, G, D], [B, H, S, D], [B, H, S, D], [B, H, K] each"
        )
    dtypes = [str(x.dtype) for x in others]
    expected = ["int32", "bool", "float32"][: len(others)]
    if dtypes != expected:
        raise ValueError(f"gather_attention: got slots, mask (and bias) of {dtypes}, expected {expected}")
    return GATHER_ATTENTION.run(
        query,
        key,
        value,
        slots,
        mask,
        scale=scale,
        bias=bias,
        implementation=implementation,
        platform=platform,
    )
