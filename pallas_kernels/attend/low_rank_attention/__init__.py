"""Decode attention over lists of pages whose keys are products of two thin matrices (ShadowKV)."""

from __future__ import annotations

import jax

from pallas_kernels.attend.low_rank_attention import pallas_triton, reference
from pallas_kernels.attend.low_rank_attention.reference import rebuild
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["LOW_RANK_ATTENTION", "low_rank_attention", "rebuild"]

LOW_RANK_ATTENTION = Operation(
    "low_rank_attention",
    {
        "pallas_triton": Implementation(pallas_triton.low_rank_attention, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.low_rank_attention),
    },
    logits=True,
)


def low_rank_attention(
    query: jax.Array,
    left: jax.Array,
    right: jax.Array,
    value: jax.Array,
    pages: jax.Array,
    mask: jax.Array,
    *,
    page_size: int,
    inv_freq: jax.Array,
    scale: float,
    partials: tuple[jax.Array, jax.Array] | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with one query per head to the tokens of the listed pages only; softmax in float32.

    The key of the token in slot i is ``left[i] @ right`` of its head, rotated (rotary embedding, pairs (c, c + D/2), angle
    ``i * inv_freq[c]`` in float32) and then rounded to the dtype of the query. Tokens that are not listed, or listed and
    masked, never enter, and may hold anything, NaN included. A page that is listed twice counts twice.

    Not differentiable: ``xla`` runs ``dense_decode``, which loops up to a traced bound.

    Args:
        query: [B, H, G, D].
        left: [B, S, R], same dtype; all heads share it.
        right: [B, H, R, D], same dtype.
        value: [B, H, S, D], same dtype; or in host memory, and then only the listed rows cross the bus.
        pages: int32 [B, H, K], K above 0; page p is slots p * page_size to (p + 1) * page_size - 1. Each begins below S where
            ``mask`` is true, and may be anything elsewhere; of the last one, slots at S or beyond do not enter.
        mask: bool [B, H, K]; an entry with False is ignored.
        page_size: slots per page.
        inv_freq: float32 [D/2], radians per slot.
        scale: factor of the logits, a Python number.
        partials: N parts of attention to other tokens, which enter the same softmax, as in `gather_attention`; or None.
        implementation: "pallas_triton" (GPU; D a power of two, R a multiple of 16), "xla", or None for the first that runs.
        platform: see ``Operation.run``. ``LOW_RANK_ATTENTION.resolve`` tells which implementation a call uses.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G], the log of the softmax denominator; 0 and -inf
        where no token is listed, and nothing is beside.

    Raises:
        ValueError: shapes or dtypes disagree, ``page_size`` is below 1, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if query.ndim != 4 or left.ndim != 3 or pages.ndim != 3 or page_size < 1:
        raise ValueError(
            f"low_rank_attention: got query {query.shape}, left {left.shape}, pages {pages.shape} and {page_size=}, expected "
            "[B, H, G, D], [B, S, R], [B, H, K] and at least 1"
        )
    (batch, heads, _, dim), (_, slots, rank) = query.shape, left.shape
    expected = {
        "left": (batch, slots, rank),
        "right": (batch, heads, rank, dim),
        "value": (batch, heads, slots, dim),
        "pages": (batch, heads, max(pages.shape[2], 1)),
        "mask": pages.shape,
        "inv_freq": (dim // 2,),
    }
    got = [x.shape for x in (left, right, value, pages, mask, inv_freq)]
    if got != [*expected.values()]:
        raise ValueError(f"low_rank_attention: got {', '.join(expected)} {got}, expected {[*expected.values()]}")
    dtypes = [str(x.dtype) for x in (query, left, right, value)]
    others = [str(x.dtype) for x in (pages, mask, inv_freq)]
    if len(set(dtypes)) > 1 or others != ["int32", "bool", "float32"]:
        raise ValueError(
            f"low_rank_attention: got query, left, right, value of {dtypes} and pages, mask, inv_freq of {others}, "
            "expected one dtype, and int32, bool, float32"
        )
    if partials is not None:
        out, lse = (x.shape for x in partials)
        if lse != (*query.shape[:2], *lse[2:3], query.shape[2]) or out != (*lse, dim):
            raise ValueError(f"low_rank_attention: got partials {out}, {lse}, expected [B, H, N, G, D] and [B, H, N, G]")
    return LOW_RANK_ATTENTION.run(
        query,
        left,
        right,
        value,
        pages,
        mask,
        page_size=page_size,
        inv_freq=inv_freq,
        scale=scale,
        partials=partials,
        implementation=implementation,
        platform=platform,
    )
