"""Attention over listed blocks of packed vectors and a buffer of raw tokens (MosaicKV)."""

from __future__ import annotations

import jax

from pallas_kernels.attend.packed_attention import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["PACKED_ATTENTION", "packed_attention"]

PACKED_ATTENTION = Operation(
    "packed_attention",
    {
        "pallas_triton": Implementation(pallas_triton.packed_attention, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.packed_attention),
    },
    logits=True,
)


def packed_attention(
    parts: jax.Array,
    query: jax.Array,
    key: tuple[jax.Array, jax.Array],
    value: tuple[jax.Array, jax.Array],
    basis: jax.Array,
    blocks: jax.Array,
    count: jax.Array,
    last: jax.Array,
    recent: tuple[jax.Array, jax.Array, jax.Array],
    *,
    scale: float,
    granule: int,
    span: int,
    owner: jax.Array | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Attend to the tokens of listed packed blocks and all tokens of a raw buffer, under one softmax.

    Block p holds slots ``p * granule`` to ``(p + 1) * granule - 1``. Only the output is projected back onto the model's
    basis, never the cache.

    Differentiable: through ``xla``.

    Args:
        parts: [B, H, M, G, N, D], made by `project_query`.
        query: [B, H, G, D], the same queries in the model's basis.
        key: values [B, H, S, r] and bitmap int32 [B, H, S, D/32] of the keys, see `packed_score`.
        value: values and bitmap of the values, as ``key``.
        basis: float32 [B, H, M, D, D], in which the values are packed.
        blocks: int32 [B, H, K], block ids, **ascending** up to ``count``; entries behind it may hold anything.
        count: int32 [B, H], blocks listed, at most K.
        last: int32 [B], the highest segment, see `packed_score`.
        recent: key [B, H, R, D], value [B, H, R, D] and position int32 [B, H, R] of the buffer; a negative position means
            that the slot holds no token.
        scale: factor of the logits, a Python number.
        granule: tokens per block.
        span: blocks per segment.
        owner: int32 [B, P], the segment of every block, ascending; or None.
        implementation: "pallas_triton" (GPU; D of 32 to 256, all of one dtype), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        [B, H, G, D] in the dtype of the query; zeros for a list without a block and a buffer without a token.

    Raises:
        ValueError: shapes disagree or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    lead, dim = query.shape[:2], query.shape[3]
    fits = parts.shape[:2] == lead and parts.shape[3] == query.shape[2] and parts.shape[5] == dim
    fits = fits and all(x.shape[:3] == (*lead, key[0].shape[2]) for x in (*key, *value))
    fits = fits and basis.shape == (*lead, parts.shape[2], dim, dim) and blocks.shape[:2] == lead == count.shape
    fits = fits and recent[0].shape == recent[1].shape == (*recent[2].shape, dim) and recent[2].shape[:2] == lead
    if not fits or last.shape != lead[:1]:
        shapes = [x.shape for x in (parts, query, *key, *value, basis, blocks, count, last, *recent)]
        raise ValueError(
            f"packed_attention: got {shapes}, expected parts [B, H, M, G, N, D], query [B, H, G, D], key and value "
            "[B, H, S, r] and [B, H, S, D/32] each. Expected basis [B, H, M, D, D], blocks [B, H, K], count [B, H], "
            "last [B], recent [B, H, R, D] twice and [B, H, R]"
        )
    return PACKED_ATTENTION.run(
        parts, query, key, value, basis, blocks, count, last, recent,
        scale=scale, granule=granule, span=span, owner=owner, implementation=implementation, platform=platform,
    )  # fmt: skip
