"""How MosaicKV prunes a segment of tokens: its bases, the channels it may keep, and the search for rate and block size.

Everything here concerns one segment per row. `store.py` keeps the segments, and `attention.py` reads them.
Source: MosaicKV (arXiv:2607.00760), orthogonal transform, packed format and dynamic strategy.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.methods.mosaickv.packing import bytes_per_vector, channel_score, pack_channels
from kvjax.typing import pytree

SHARES = (1, 2, 3)  # eighths of the channels the dynamic strategy may keep
GROUPS = (4, 2, 1)  # element groups it may use, fewest bitmap bytes first
BLOCKS = (4, 8, 16)  # tokens per block it may use

exact = {"precision": lax.Precision.HIGHEST}  # of products that decide what is kept


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Static sizes of the packed storage of one layer."""

    dim: int  # D
    rank: int  # values stored per vector; the most the dynamic strategy may keep
    channels: int  # leading rotated channels that may be kept
    element_group: int  # of the static strategy
    granule: int  # tokens per stored block mean
    window: int  # tokens of the largest block; a multiple of the granule
    buffer: int  # tokens packed together; a multiple of the window
    segment: int  # prompt tokens that share a pruning; a multiple of the buffer
    dynamic: bool  # rate, element group and block size are chosen per row, KV head and segment
    rotate: bool  # False: the basis is the identity
    per_vector: bool  # False: one set of channels per segment


@pytree
class Packed:
    """Pruned vectors; see `kvjax.methods.mosaickv.packing`."""

    values: Array  # [..., r]
    bitmap: Array  # uint8 [..., D/8], or int32 words [..., D/32] once stored


@pytree
class Segment:
    """How the vectors of a segment are pruned. Leaves [B, H, ...], or [B, H, N, ...] for N segments."""

    basis_key: Array  # float32 [B, H, D, D], rows: unit eigenvectors of the keys' second moment, decreasing eigenvalue
    basis_value: Array  # float32 [B, H, D, D], of the values'
    channels_key: Array | None  # bool [B, H, D], the channels kept when all vectors keep the same; None: per vector
    channels_value: Array | None
    rank: Array | None  # int32 [B, H], channels kept; None: all with room (static strategy), so are the next two
    group: Array | None  # int32 [B, H], element group
    block: Array | None  # int32 [B, H], tokens per block


def fit(layout: Layout, key: Array, value: Array, valid: Array, max_loss: Array, max_variance: Array) -> Segment:
    """The pruning of the tokens of one segment.

    Args:
        layout: static sizes.
        key: float32 [B, H, S, D], rotated by their positions, zero where not valid.
        value: float32 [B, H, S, D], likewise.
        valid: bool [B, S], whole windows; S is a multiple of the window.
        max_loss: largest mean loss (share of energy pruned) a rate may have.
        max_variance: largest share of key energy that may lie inside blocks.
    """
    basis_key, basis_value = (_basis(layout, x) for x in (key, value))
    rotated = turn(basis_key, key), turn(basis_value, value)
    channels = [None, None] if layout.per_vector else [_channels(layout, y) for y in rotated]
    rank = group = block = None
    if layout.dynamic:
        tokens = jnp.sum(valid, axis=1, dtype=jnp.int32)
        rank, group = _rate(layout, *rotated, tokens, max_loss)
        block = _block(key, tokens, max_variance)
    return Segment(
        basis_key=basis_key,
        basis_value=basis_value,
        channels_key=channels[0],
        channels_value=channels[1],
        rank=rank,
        group=group,
        block=block,
    )


def turn(basis: Array, x: Array) -> Array:
    """Vectors x [B, H, S, D] in ``basis`` [B, H, D, D]: float32 [B, H, S, D]."""
    return jnp.einsum("bhsd,bhed->bhse", x, basis, **exact)


def prune(layout: Layout, segment: Segment, y: Array, channels: Array | None) -> Packed:
    """Keep the best channels of rotated vectors y float32 [B, H, S, D], ``channels`` if these are fixed; float32 values."""
    if channels is not None:
        score = jnp.broadcast_to(channels[:, :, None], y.shape).astype(jnp.float32)
    elif segment.group is None:
        score = _eligible(layout, channel_score(y, layout.element_group))
    else:
        score = channel_score(y, 1)
        for size in GROUPS[:-1]:
            score = jnp.where(segment.group[..., None, None] == size, channel_score(y, size), score)
        score = _eligible(layout, score)
    kept = None if segment.rank is None else segment.rank[..., None, None]
    values, bitmap = pack_channels(y, score, layout.rank, jnp.float32, kept)
    return Packed(values=values, bitmap=bitmap)


def prune_tokens(layout: Layout, segment: Segment, key: Array, value: Array) -> tuple[Packed, Packed, Array]:
    """Packed keys and values of float32 [B, H, S, D], and the loss of each token, float32 [B, H, S].

    The loss is the share of a vector's energy that is pruned, mean of key and value; a zero vector loses nothing.
    """
    rotated = turn(segment.basis_key, key), turn(segment.basis_value, value)
    packed = [
        prune(layout, segment, y, c)
        for y, c in zip(rotated, (segment.channels_key, segment.channels_value), strict=True)
    ]
    lost = [_lost(energy(p.values), energy(y)) for p, y in zip(packed, rotated, strict=True)]
    return packed[0], packed[1], 0.5 * (lost[0] + lost[1])


def prune_blocks(layout: Layout, segment: Segment, key: Array) -> Packed:
    """Packed means of the blocks of keys float32 [B, H, S, D], S a multiple of the window: [B, H, S/granule, ...].

    Averaging and rotating commute. A block of several granules has its mean in each of them.
    """
    mean = _means(key, layout.granule)
    if segment.block is not None:
        for size in BLOCKS[1:]:
            wide = jnp.repeat(_means(key, size), size // layout.granule, axis=2)
            mean = jnp.where((segment.block == size)[..., None, None], wide, mean)
    return prune(layout, segment, turn(segment.basis_key, mean), segment.channels_key)


def vector_bytes(layout: Layout, segment: Segment, itemsize: int) -> Any:
    """Bytes of one packed vector: a number, or float32 [B, H, ...] in a dynamic strategy."""
    if segment.rank is None:
        return bytes_per_vector(layout.rank, layout.channels, layout.element_group, itemsize)
    rank, group = segment.rank.astype(jnp.float32), segment.group.astype(jnp.float32)
    return bytes_per_vector(rank, layout.channels, group, itemsize)


def pick(segments: Segment, index: Array) -> Segment:
    """Segment ``index`` int32 [B] of leaves [B, H, N, ...]: leaves [B, H, ...]."""
    row = jnp.arange(index.shape[0])
    return jax.tree.map(lambda x: x[:, :, 0] if x.shape[2] == 1 else x[row, :, index], segments)


def stack(segments: list[Segment], spare: int) -> Segment:
    """Segments of leaves [B, H, ...] as one of leaves [B, H, N + spare, ...]; the spare ones repeat the last."""
    return jax.tree.map(lambda *x: jnp.stack(x + x[-1:] * spare, axis=2), *segments)


def put(segments: Segment, index: Array, new: Segment) -> Segment:
    """Write segment ``index`` int32 [B] of each row; an index past the end writes nothing."""
    row = jnp.arange(index.shape[0])
    return jax.tree.map(lambda old, x: old.at[row, :, index].set(x, mode="drop"), segments, new)


def energy(x: Array) -> Array:
    """Squared norm over the last axis."""
    return jnp.sum(x * x, axis=-1)


def _lost(kept: Array, total: Array) -> Array:
    return jnp.where(total > 0, 1 - kept / jnp.where(total > 0, total, 1), 0)


def _eligible(layout: Layout, score: Array) -> Array:
    """Scores with channels that are never stored below all others."""
    if layout.channels == layout.dim:
        return score
    channel = jnp.arange(layout.dim).reshape((1,) * (score.ndim - 1) + (-1,))
    return jnp.where(channel < layout.channels, score, -1)


def _basis(layout: Layout, x: Array) -> Array:
    """Rows: eigenvectors of the uncentred second moment of x float32 [B, H, S, D], by decreasing eigenvalue.

    Fewer tokens than channels, or repeated ones, leave directions without any energy. Later tokens are packed in them too, so
    they must not hang on rounding (a row would differ from itself in a larger batch): they are the eigenvectors of a fixed
    diagonal matrix within that space, which makes the basis of no token at all the identity.
    """
    identity = jnp.broadcast_to(jnp.eye(layout.dim, dtype=jnp.float32), (*x.shape[:2], layout.dim, layout.dim))
    if not layout.rotate:
        return identity
    values, rows = _eigenrows(jnp.einsum("bhsd,bhse->bhde", x, x, **exact))
    known = values > layout.dim * jnp.finfo(jnp.float32).eps * values[..., :1]
    spanned = jnp.where(known[..., None], rows, 0)
    rest = identity - jnp.einsum("bhnd,bhne->bhde", spanned, spanned, **exact)
    scale = jnp.linspace(2, 1, layout.dim, dtype=jnp.float32)  # all well above the zeros of the known directions
    _, others = _eigenrows(jnp.einsum("bhde,e,bhef->bhdf", rest, scale, rest, **exact))
    order = jnp.arange(layout.dim)[None, None]
    count = jnp.sum(known, axis=-1, keepdims=True)
    index = jnp.where(order < count, order, layout.dim + order - count)
    return jnp.take_along_axis(jnp.concatenate([rows, others], axis=2), index[..., None], axis=2)


def _eigenrows(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues [..., D] of symmetric matrices, decreasing, and the eigenvectors as rows [..., D, D]."""
    values, vectors = jnp.linalg.eigh(matrix)
    return values[..., ::-1], vectors[..., ::-1].swapaxes(-1, -2)


def _channels(layout: Layout, y: Array) -> Array:
    """The channels with most energy over the segment, bool [B, H, D]: uniform pruning, the ablation of per-vector."""
    total = jnp.sum(y * y, axis=2)
    groups = total.reshape(*total.shape[:2], -1, layout.element_group).sum(axis=-1)
    score = _eligible(layout, jnp.repeat(groups, layout.element_group, axis=-1))
    _, best = lax.top_k(score, layout.rank)
    return (best[..., None] == jnp.arange(layout.dim)[None, None, None]).any(axis=2)


def _rate(layout: Layout, key: Array, value: Array, tokens: Array, max_loss: Array) -> tuple[Array, Array]:
    """Fewest bytes whose mean loss is allowed, else the highest rate without groups: rank and group int32 [B, H].

    A step in rate outweighs any bitmap, so candidates ordered by rate, then by group, are ordered by bytes.
    """
    losses = {}
    for size in GROUPS:
        if layout.channels % size or layout.rank < size:
            continue
        shares = []
        for y in (key, value):
            groups = y[..., : layout.channels].reshape(*y.shape[:3], -1, size)
            best, _ = lax.top_k(energy(groups), layout.rank // size)
            shares.append((jnp.cumsum(best, axis=-1), energy(y)[..., None]))
        loss = 0.5 * sum(_lost(kept, total) for kept, total in shares)  # [B, H, S, groups kept - 1]
        mean = loss.sum(axis=2) / jnp.maximum(tokens, 1).astype(jnp.float32)[:, None, None]
        for share in SHARES:
            rank = share * layout.dim // 8
            if rank % size == 0:
                losses[rank, size] = mean[..., rank // size - 1]
    shape = key.shape[:2]
    rank, group = jnp.full(shape, layout.rank, jnp.int32), jnp.ones(shape, jnp.int32)
    for candidate in sorted(losses, key=lambda pair: (-pair[0], pair[1])):  # the cheapest has the last word
        allowed = (losses[candidate] <= max_loss) & (tokens > 0)[:, None]
        rank, group = jnp.where(allowed, candidate[0], rank), jnp.where(allowed, candidate[1], group)
    return rank, group


def _block(key: Array, tokens: Array, max_variance: Array) -> Array:
    """Largest block whose keys differ little enough from their mean, else the smallest: int32 [B, H]."""
    total = energy(key).sum(axis=2)
    block = jnp.full(key.shape[:2], BLOCKS[0], jnp.int32)
    for size in BLOCKS[1:]:
        inside = energy(key - jnp.repeat(_means(key, size), size, axis=2)).sum(axis=2)
        allowed = (inside <= max_variance * total) & (tokens > 0)[:, None]
        block = jnp.where(allowed, size, block)
    return block


def _means(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1]).mean(axis=3)
