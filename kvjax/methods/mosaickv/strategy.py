"""How MosaicKV prunes a segment of tokens: its bases, its channels, and the search for rate and block size.

Every function here is about one segment per row. `store.py` keeps the segments, and `attention.py` reads them.
Source: MosaicKV (arXiv:2607.00760), orthogonal transform, packed format and dynamic strategy.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.protocol.typing import not_none, pytree
from pallas_kernels.formats.packed_vectors import channel_score, pack_channels

SHARES = (1, 2, 3)  # choices of the dynamic strategy: eighths of the channels to keep
GROUPS = (4, 2, 1)  # its element groups, the fewest bitmap bytes first
BLOCKS = (4, 8, 16)  # its tokens per block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Static sizes of the packed storage of one layer."""

    dim: int  # D
    rank: int  # values stored per vector; the dynamic strategy keeps as many or fewer
    granule: int  # tokens per stored block mean
    window: int  # tokens of the largest block; a multiple of the granule
    buffer: int  # tokens that become visible together; a multiple of the window
    segment: int  # prompt tokens that share a pruning; a multiple of the buffer
    dynamic: bool  # True: rate, element group and block size are chosen per row, KV head and segment

    def segments(self, slots: int) -> range:
        """Return the first slots of the segments of a prompt of ``slots`` slots."""
        return range(0, max(slots // self.buffer * self.buffer, 1), self.segment)


@pytree
class Packed:
    """Pruned vectors; see `pallas_kernels.formats.packed_vectors`."""

    values: Array  # [..., r]
    bitmap: Array  # uint8 [..., D/8]; in storage int32 words [..., D/32]


@pytree
class Segment:
    """How the vectors of a segment are pruned. Leaves [B, H, ...], or [B, H, N, ...] for N segments.

    The last three are None under the static strategy.
    """

    basis_key: Array  # float32 [B, H, D, D], rows: unit eigenvectors of the keys' second moment, by decreasing eigenvalue
    basis_value: Array  # float32 [B, H, D, D], the same for values
    rank: Array | None  # int32 [B, H], kept channels
    group: Array | None  # int32 [B, H], element group
    block: Array | None  # int32 [B, H], tokens per block

    @property
    def block_size(self) -> Array:
        """Tokens per block under the dynamic strategy, int32 [B, H, ...]."""
        return not_none("block", self.block)


def fit(
    layout: Layout, bases: Array, key: Array, value: Array, valid: Array, max_loss: float | Array, max_variance: float | Array
) -> Segment:
    """Fit the pruning for the tokens of one segment.

    Args:
        layout: static sizes.
        bases: float32 [B, 2, H, D, D], the `basis` of their `moments`.
        key: float32 [B, H, S, D], rotated by position; zero for tokens that are not valid.
        value: float32 [B, H, S, D]; zero for tokens that are not valid.
        valid: bool [B, S], whole windows; S is a multiple of the window.
        max_loss: the largest mean loss (share of pruned energy) of a rate.
    """
    basis_key, basis_value = bases[:, 0], bases[:, 1]
    rotated = to_basis(basis_key, key), to_basis(basis_value, value)
    rank = group = block = None
    if layout.dynamic:
        tokens = jnp.sum(valid, axis=1, dtype=jnp.int32)
        rank, group = _rate(layout, *rotated, tokens, max_loss)
        block = _block(key, tokens, max_variance)
    return Segment(basis_key=basis_key, basis_value=basis_value, rank=rank, group=group, block=block)


def product(subscripts: str, *factors: Array) -> Array:
    """Multiply as `jnp.einsum`, at the highest precision, because these products decide which channels are kept."""
    return jnp.einsum(subscripts, *factors, precision=lax.Precision.HIGHEST)


def to_basis(basis: Array, x: Array) -> Array:
    """Rotate vectors x [B, H, S, D] into ``basis`` [B, H, D, D]: float32 [B, H, S, D]."""
    return product("bhsd,bhed->bhse", x, basis)


def prune(layout: Layout, segment: Segment, key: Array, value: Array, stored: Array) -> tuple[Packed, Packed, Packed, Array]:
    """Pack keys and values float32 [B, H, T, D], and the means of blocks of keys ``stored`` float32 [B, H, S, D].

    The vectors are packed in one call: on a GPU a sort takes long to compile, and every layer has its own.

    Returns:
        The keys and the values [B, H, T, ...], and the blocks as in `_block_means`; float32 values. And the loss of each
        token, float32 [B, H, T]: the pruned share of a vector's energy, averaged over key and value. A zero vector has none.
    """
    bases = segment.basis_key, segment.basis_value, segment.basis_key
    given = key, value, _block_means(layout, segment, stored)
    rotated = [to_basis(basis, x) for basis, x in zip(bases, given, strict=True)]
    scores = [_score(segment, y) for y in rotated]
    kept = None if segment.rank is None else segment.rank[..., None, None]
    packed = pack_channels(jnp.concatenate(rotated, axis=2), jnp.concatenate(scores, axis=2), layout.rank, jnp.float32, kept)
    ends = [key.shape[2], 2 * key.shape[2]]
    parts = zip(*(jnp.split(x, ends, axis=2) for x in packed), strict=True)
    keys, values, blocks = (Packed(values=own, bitmap=bits) for own, bits in parts)
    lost = [_lost(energy(one.values), energy(y)) for one, y in zip((keys, values), rotated[:2], strict=True)]
    return keys, values, blocks, 0.5 * (lost[0] + lost[1])


def _score(segment: Segment, y: Array) -> Array:
    """Score the channels of rotated vectors y float32 [B, H, S, D]."""
    score = channel_score(y, 1)
    if segment.group is not None:
        for size in GROUPS[:-1]:
            score = jnp.where(segment.group[..., None, None] == size, channel_score(y, size), score)
    return score


def _block_means(layout: Layout, segment: Segment, key: Array) -> Array:
    """Compute the means of blocks of keys float32 [B, H, S, D], S a multiple of the window: [B, H, S/granule, D].

    The mean is rotated, which equals the mean of rotated keys. A block of several granules has its mean in each of them.
    """
    mean = _means(key, layout.granule)
    if segment.block is not None:
        for size in BLOCKS[1:]:
            wide = jnp.repeat(_means(key, size), size // layout.granule, axis=2)
            mean = jnp.where((segment.block == size)[..., None, None], wide, mean)
    return mean


def bytes_per_vector(rank: Any, channels: int, element_group: Any, itemsize: int) -> Any:
    """Count the bytes of one packed vector: its values, and one bit for each group of the ``channels``."""
    return rank * itemsize + channels / (8 * element_group)


def vector_bytes(layout: Layout, segment: Segment, itemsize: int) -> Any:
    """Count the bytes of one packed vector: a number, or float32 [B, H, ...] under the dynamic strategy."""
    if segment.rank is None or segment.group is None:
        return bytes_per_vector(layout.rank, layout.dim, 1, itemsize)
    rank, group = segment.rank.astype(jnp.float32), segment.group.astype(jnp.float32)
    return bytes_per_vector(rank, layout.dim, group, itemsize)


def pick(segments: Segment, index: Array) -> Segment:
    """Pick segment ``index`` int32 [B] of each row, from leaves [B, H, N, ...] to leaves [B, H, ...]."""
    row = jnp.arange(index.shape[0])
    return jax.tree.map(lambda x: x[:, :, 0] if x.shape[2] == 1 else x[row, :, index], segments)


def stack(segments: list[Segment], spare: int) -> Segment:
    """Join segments: N trees with leaves [B, H, ...] to leaves [B, H, N + spare, ...]; spare entries repeat the last."""
    return jax.tree.map(lambda *x: jnp.stack(x + x[-1:] * spare, axis=2), *segments)


def put(segments: Segment, index: Array, new: Segment) -> Segment:
    """Write segment ``index`` int32 [B] of each row; an index past the end writes nothing."""
    row = jnp.arange(index.shape[0])
    return jax.tree.map(lambda old, x: old.at[row, :, index].set(x, mode="drop"), segments, new)


def energy(x: Array) -> Array:
    """Compute the squared norm over the last axis."""
    return jnp.sum(x * x, axis=-1)


def _lost(kept: Array, total: Array) -> Array:
    return jnp.where(total > 0, 1 - kept / jnp.where(total > 0, total, 1), 0)


def moments(key: Array, value: Array) -> Array:
    """Compute the uncentred second moments of keys and of values float32 [B, H, S, D]: float32 [B, 2, H, D, D]."""
    return jnp.stack([product("bhsd,bhse->bhde", x, x) for x in (key, value)], axis=1)


def basis(moment: Array) -> Array:
    """Compute the eigenvectors of moments float32 [..., D, D], as rows, by decreasing eigenvalue.

    With fewer tokens than channels, or with equal tokens, some directions have no energy. Later tokens are packed in these
    directions too, so they must not depend on rounding, or a row would differ from itself in a larger batch. They are the
    eigenvectors of a fixed diagonal matrix within that space. Without any token the basis is then the identity.
    """
    dim = moment.shape[-1]
    values, rows = _eigenrows(moment)
    known = values > dim * jnp.finfo(jnp.float32).eps * values[..., :1]
    # On a GPU the decompositions take most of a prompt's extra time, and a segment nearly always has energy everywhere.
    return lax.cond(jnp.all(known), lambda: rows, lambda: _completed(rows, known))


def _completed(rows: Array, known: Array) -> Array:
    """Complete the ``known`` eigenvectors by a basis of the space without energy, which depends on that space alone."""
    dim = rows.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(dim, dtype=jnp.float32), rows.shape)
    spanned = jnp.where(known[..., None], rows, 0)
    rest = identity - product("...nd,...ne->...de", spanned, spanned)
    scale = jnp.linspace(2, 1, dim, dtype=jnp.float32)  # well above the zeros of the known directions
    _, others = _eigenrows(product("...de,e,...ef->...df", rest, scale, rest))
    order = lax.broadcasted_iota(jnp.int32, known.shape, known.ndim - 1)
    count = jnp.sum(known, axis=-1, keepdims=True)
    index = jnp.where(order < count, order, dim + order - count)
    return jnp.take_along_axis(jnp.concatenate([rows, others], axis=-2), index[..., None], axis=-2)


def _eigenrows(matrix: Array) -> tuple[Array, Array]:
    """Compute the eigenvalues [..., D] of symmetric matrices, decreasing, and the eigenvectors as rows [..., D, D]."""
    values, vectors = jnp.linalg.eigh(matrix)
    return values[..., ::-1], vectors[..., ::-1].swapaxes(-1, -2)


def _rate(layout: Layout, key: Array, value: Array, tokens: Array, max_loss: float | Array) -> tuple[Array, Array]:
    """Find the rank and element group of the fewest bytes with an allowed mean loss: int32 [B, H] each.

    If no candidate's loss is allowed, the result is the highest rate without groups. A step in rate changes more bytes than a
    bitmap has, so the order by rate, then by group, is the order by bytes.
    """
    losses = {}
    for size in GROUPS:
        if layout.dim % size or layout.rank < size:
            continue
        # Key and value are sorted in one call, as in `prune`.
        both = jnp.concatenate([key, value], axis=2)
        groups = both.reshape(*both.shape[:3], -1, size)
        best, _ = lax.top_k(energy(groups), layout.rank // size)
        total = energy(both)
        for share in SHARES:
            rank = share * layout.dim // 8
            if rank % size == 0:
                lost_key, lost_value = jnp.split(_lost(best[..., : rank // size].sum(axis=-1), total), 2, axis=2)
                loss = 0.5 * (lost_key + lost_value).sum(axis=2)  # [B, H]
                losses[rank, size] = loss / jnp.maximum(tokens, 1).astype(jnp.float32)[:, None]
    shape = key.shape[:2]
    rank, group = jnp.full(shape, layout.rank, jnp.int32), jnp.ones(shape, jnp.int32)
    for candidate in sorted(losses, key=lambda pair: (-pair[0], pair[1])):  # the cheapest is written last
        allowed = (losses[candidate] <= max_loss) & (tokens > 0)[:, None]
        rank, group = jnp.where(allowed, candidate[0], rank), jnp.where(allowed, candidate[1], group)
    return rank, group


def _block(key: Array, tokens: Array, max_variance: float | Array) -> Array:
    """Find the largest block with an allowed variance of keys, or else the smallest block: int32 [B, H]."""
    total = energy(key).sum(axis=2)
    block = jnp.full(key.shape[:2], BLOCKS[0], jnp.int32)
    for size in BLOCKS[1:]:
        inside = energy(key - jnp.repeat(_means(key, size), size, axis=2)).sum(axis=2)
        allowed = (inside <= max_variance * total) & (tokens > 0)[:, None]
        block = jnp.where(allowed, size, block)
    return block


def _means(x: Array, size: int) -> Array:
    return x.reshape(*x.shape[:2], -1, size, x.shape[-1]).mean(axis=3)
