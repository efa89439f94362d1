"""Vectors pruned to their largest coordinates, with a bitmap of which those are: scores of them, attention over them.

A packed vector of D channels is r values in channel order and D bits: int32 words [D/32], channel c being bit ``c % 32`` of
word ``c // 32`` (uint8 [D/8] where D is no multiple of 32). It lives in the basis of its segment, so a query is turned into
every segment's basis first. Source of the format: MosaicKV (arXiv:2607.00760).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.packed_attention import attend, pack, reference, score
from pallas_kernels.packed_attention.reference import PARTS, bytes_of, channel_score, pack_channels, unpack, words_of

__all__ = [
    "PACKED_ATTENTION",
    "PACKED_SCORE",
    "PACK_TOKEN",
    "TURN_QUERY",
    "bytes_of",
    "channel_score",
    "pack_channels",
    "pack_token",
    "packed_attention",
    "packed_score",
    "turn_query",
    "unpack",
    "words_of",
]


def _check(dim: int, *dtypes: DTypeLike) -> None:
    """What the kernels take: head dims of whole words, values whose products with a split query are exact."""
    if dim not in (32, 64, 128, 256):
        raise NotImplementedError(f"got head_dim {dim}, expected 32, 64, 128 or 256")
    names = {str(jnp.dtype(x)) for x in dtypes}
    if len(names) != 1 or not names <= set(PARTS):
        raise NotImplementedError(f"got dtypes {sorted(names)}, expected one of {list(PARTS)} for all")


def _check_turn(query, basis, *, dtype):
    _check(query.shape[-1], dtype)


def _check_score(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    _check(parts.shape[-1], parts.dtype, values.dtype)


def _check_attention(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    _check(query.shape[-1], *(x.dtype for x in (parts, query, key[0], value[0], *recent[:2])))


def _check_pack(
    key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule, element_group, channels
):
    _check(key.shape[-1], key.dtype, value.dtype, *(x.dtype for x in store[::2]))
    if key.shape[-1] > 128:
        raise NotImplementedError(f"got head_dim {key.shape[-1]}, expected at most 128")


PACK_TOKEN = Operation(
    "pack_token",
    {
        "pallas_triton": Implementation(pack.pack_token, ("gpu",), _check_pack),
        "xla": Implementation(reference.pack_token),
    },
)
TURN_QUERY = Operation(
    "turn_query",
    {
        "pallas_triton": Implementation(score.turn_query, ("gpu",), _check_turn),
        "xla": Implementation(reference.turn_query),
    },
)
PACKED_SCORE = Operation(
    "packed_score",
    {
        "pallas_triton": Implementation(score.packed_score, ("gpu",), _check_score),
        "xla": Implementation(reference.packed_score),
    },
)
PACKED_ATTENTION = Operation(
    "packed_attention",
    {
        "pallas_triton": Implementation(attend.packed_attention, ("gpu",), _check_attention),
        "xla": Implementation(reference.packed_attention),
    },
)


def turn_query(
    query: jax.Array,
    basis: jax.Array,
    *,
    dtype: DTypeLike,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Queries in the basis of every segment, as terms of ``dtype`` whose float32 sum they are.

    A product of bfloat16 terms with bfloat16 values is exact in float32, so scores are those of a float32 query though tensor
    cores compute them.

    Args:
        query: [B, H, G, D].
        basis: float32 [B, H, M, D, D], rows are unit vectors.
        dtype: bfloat16, float16 or float32.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        [B, H, M, G, N, D] in ``dtype``, N terms each.

    Raises:
        ValueError: shapes disagree, ``dtype`` is another one, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    agree = query.ndim == 4 and basis.ndim == 5
    if not agree or basis.shape != (*query.shape[:2], basis.shape[2], query.shape[3], query.shape[3]):
        raise ValueError(
            f"turn_query: got query {query.shape}, basis {basis.shape}, expected [B, H, G, D], [B, H, M, D, D]"
        )
    if str(jnp.dtype(dtype)) not in PARTS:
        raise ValueError(f"turn_query: got dtype {dtype}, expected one of {list(PARTS)}")
    return TURN_QUERY.run(query, basis, dtype=jnp.dtype(dtype), implementation=implementation, platform=platform)


def packed_score(
    parts: jax.Array,
    values: jax.Array,
    bitmap: jax.Array,
    count: jax.Array,
    last: jax.Array,
    *,
    span: int,
    unit: int = 1,
    owner: jax.Array | None = None,
    reduce: str | None = "max",
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Products of queries with packed vectors, each in the basis of its own segment.

    Args:
        parts: [B, H, M, G, N, D], of `turn_query`, in the dtype of the values.
        values: [B, H, P, r]; what follows the values of a vector's bits is zero.
        bitmap: int32 [B, H, P, D/32] (uint8 [B, H, P, D/8] if D is no multiple of 32). Any r bits at most.
        count: int32 [B], ``unit`` times the vectors that there are; what lies behind them may hold anything.
        last: int32 [B], the highest segment, if ``owner`` is None: vector p then has segment ``min(p // span, last)``.
        span: vectors per segment.
        unit: what one vector counts; a remainder of ``count`` is dropped.
        owner: int32 [B, P], the segment of every vector, ascending; or None.
        reduce: "max" or "mean" over the G query heads, or None for the scores of each.
        implementation: "pallas_triton" (GPU; D of 32 to 256), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, P], or [B, H, G, P] if ``reduce`` is None; -inf from ``count`` on.

    Raises:
        ValueError: shapes or dtypes disagree, ``reduce`` or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if reduce not in ("max", "mean", None):
        raise ValueError(f"packed_score: got reduce={reduce!r}, expected 'max', 'mean' or None")
    rows, vectors = parts.shape[0], values.shape[:3]
    fits = parts.ndim == 6 and values.ndim == 4 and vectors[:2] == parts.shape[:2] and bitmap.shape[:3] == vectors
    if not fits or count.shape != (rows,) or last.shape != (rows,) or values.dtype != parts.dtype:
        raise ValueError(
            f"packed_score: got parts {parts.shape} {parts.dtype}, values {values.shape} {values.dtype}, bitmap "
            f"{bitmap.shape}, count {count.shape}, last {last.shape}, expected [B, H, M, G, N, D], [B, H, P, r] of the same "
            "dtype, [B, H, P, D/32], [B], [B]"
        )
    if owner is not None and owner.shape != (rows, vectors[2]):
        raise ValueError(f"packed_score: got owner {owner.shape}, expected [B, P]={(rows, vectors[2])}")
    return PACKED_SCORE.run(
        parts, values, bitmap, count, last,
        span=span, unit=unit, owner=owner, reduce=reduce, implementation=implementation, platform=platform,
    )  # fmt: skip


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
    """One softmax over the tokens of listed packed blocks and all tokens of a raw buffer.

    Block p holds slots ``p * granule`` to ``(p + 1) * granule - 1``. The cache is never turned back, the output is.

    Args:
        parts: [B, H, M, G, N, D], of `turn_query`.
        query: [B, H, G, D], the same queries, not turned.
        key: values [B, H, S, r] and bitmap int32 [B, H, S, D/32] (see `packed_score`) of the keys.
        value: likewise of the values.
        basis: float32 [B, H, M, D, D], in which the values are packed.
        blocks: int32 [B, H, K], block ids, **ascending** up to ``count``; what follows may hold anything.
        count: int32 [B, H], blocks listed, at most K.
        last: int32 [B], see `packed_score`, as ``span`` and ``owner``, which are in blocks.
        recent: key [B, H, R, D], value [B, H, R, D] and position int32 [B, H, R] of the buffer; negative = no token.
        scale: factor of the logits, a Python number.
        granule: tokens per block.
        span: blocks per segment.
        owner: int32 [B, P], the segment of every block, ascending; or None.
        implementation: "pallas_triton" (GPU; D of 32 to 256, all of one dtype), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        [B, H, G, D] in the dtype of the query; zeros where there is neither a block nor a token.

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
            "[B, H, S, r] and [B, H, S, D/32] each, basis [B, H, M, D, D], blocks [B, H, K], count [B, H], last [B], "
            "recent [B, H, R, D] twice and [B, H, R]"
        )
    return PACKED_ATTENTION.run(
        parts, query, key, value, basis, blocks, count, last, recent,
        scale=scale, granule=granule, span=span, owner=owner, implementation=implementation, platform=platform,
    )  # fmt: skip


def pack_token(
    key: jax.Array,
    value: jax.Array,
    stored: jax.Array,
    place: jax.Array,
    packed: jax.Array,
    last: jax.Array,
    basis_key: jax.Array,
    basis_value: jax.Array,
    store: tuple[jax.Array, ...],
    *,
    granule: int,
    element_group: int,
    channels: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Pack one token of a buffer, and the mean of the keys of its block, into a store, in place where that is allowed.

    The r largest channels are kept, equal ones by lower channel (see `channel_score`).

    Args:
        key: [B, H, R, D], the buffer's; slot i of it holds the token at position ``packed + i``.
        value: [B, H, R, D].
        stored: int32 [B, H, R], position of what the buffer's slots hold; negative = nothing, which counts as zero.
        place: int32 [B], position of the token; negative = none.
        packed: int32 [B], tokens in front of the buffer, a multiple of ``granule``.
        last: int32 [B], segment in whose basis it is packed.
        basis_key: float32 [B, H, M, D, D], of keys and block means.
        basis_value: float32 [B, H, M, D, D].
        store: values [B, H, S, r] and bitmap int32 [B, H, S, D/32] of the keys, the same of the values, then [B, H, P, ...]
            of the block means: slot i is position i, block p begins at ``p * granule``. A position past the end is dropped.
        granule: tokens per block.
        element_group: adjacent channels that are kept or dropped together.
        channels: leading channels that may be kept.
        implementation: "pallas_triton" (GPU; D of 32 to 128), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The six arrays of ``store``.

    Raises:
        ValueError: shapes disagree or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    lead, rows = key.shape[:2], (key.shape[0],)
    fits = key.shape == value.shape == (*stored.shape, key.shape[-1]) and len(store) == 6
    fits = fits and place.shape == packed.shape == last.shape == rows
    fits = fits and basis_key.shape == basis_value.shape and basis_key.shape[:2] == lead
    if not fits or any(x.shape[:2] != lead for x in store):
        shapes = [x.shape for x in (key, value, stored, place, packed, last, basis_key, basis_value, *store)]
        raise ValueError(
            f"pack_token: got {shapes}, expected key and value [B, H, R, D], stored [B, H, R], place, packed and last [B], "
            "two bases [B, H, M, D, D], six arrays of a store [B, H, ...]"
        )
    return PACK_TOKEN.run(
        key, value, stored, place, packed, last, basis_key, basis_value, store,
        granule=granule, element_group=element_group, channels=channels,
        implementation=implementation, platform=platform,
    )  # fmt: skip
