"""Pages, chunks and grids of a whole model: one vector per page for all layers and KV heads, and selection from the top down.

A page vector is the concatenation, over KV heads and layers, of the mean key of the page's tokens. A chunk vector is the mean
of the vectors of its complete pages. A grid vector is the mean of the vectors of its chunks. The last chunk and the last grid
may have fewer members, and their means are over the members that exist. A flat tree has pages alone. The user of this tree is
`kvjax.methods.Chess`.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerCache
from kvjax.cache.divided import here, total
from kvjax.protocol.typing import pytree, static
from kvjax.rope import rotate
from kvjax.selection import page_slots, share
from pallas_kernels import axes
from pallas_kernels.numerics import join_pieces

_PAGES = 256  # pages whose keys are averaged at once

Triple = tuple[float | Array, float | Array, float | Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the hierarchy.

    Attributes:
        page_size: tokens in a page.
        fan: pages in a chunk, chunks in a grid; None for a flat tree, without chunks and grids.
    """

    page_size: int
    fan: tuple[int, int] | None

    def counts(self, num_slots: int) -> tuple[int, int, int]:
        """Compute the numbers of pages, chunks and grids for a cache of ``num_slots`` slots."""
        return self._over(-(-num_slots // self.page_size))

    def parts(self, nodes: int) -> tuple[int, int, int]:
        """Compute the numbers of pages, chunks and grids of a tree with ``nodes`` nodes."""
        return next(parts for pages in range(nodes + 1) if sum(parts := self._over(pages)) == nodes)

    def _over(self, pages: int) -> tuple[int, int, int]:
        if self.fan is None:
            return pages, 0, 0
        chunks = -(-pages // self.fan[0])
        return pages, chunks, -(-chunks // self.fan[1])


@pytree
class Nodes:
    """The vectors of all nodes, of length N = H * L * D; zero for a node that does not exist yet.

    Heads come first, so that devices that divide the heads have parts of one vector, whatever their number: a saved cache
    can be loaded on another mesh.
    """

    mean_keys: Array  # [B, pages + chunks + grids, N], dtype of the model; one matrix needs one product
    shape: Shape = static()

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of allocated pages, chunks and grids."""
        return self.shape.parts(self.mean_keys.shape[1])

    @property
    def pages(self) -> Array:
        """Page vectors [B, P, N]."""
        return self._level(0)

    @property
    def chunks(self) -> Array:
        """Chunk vectors [B, chunks, N]."""
        return self._level(1)

    @property
    def grids(self) -> Array:
        """Grid vectors [B, grids, N]."""
        return self._level(2)

    def split(self, score: Array) -> tuple[Array, Array, Array]:
        """Split scores of all nodes [B, pages + chunks + grids] into one array per level."""
        pages, chunks, _ = self.counts
        return score[:, :pages], score[:, pages : pages + chunks], score[:, pages + chunks :]

    def _level(self, level: int) -> Array:
        first = sum(self.counts[:level])
        return self.mean_keys[:, first : first + self.counts[level]]


def page_vectors(layers: list[LayerCache], pages: Array, page_size: int, inv_freq: list[Array] | None) -> Array:
    """Compute page vectors from the stored keys.

    Args:
        pages: int32 [B, P], pages to summarise; an incomplete page has the mean of its tokens so far.
        inv_freq: for each layer float32 [D/2], to undo the rotation of the keys first; None leaves them rotated.

    Returns:
        float32 [B, P, N].
    """
    return total(_own_vectors(layers, pages, page_size, inv_freq), layers[0])


def _own_vectors(layers: list[LayerCache], pages: Array, page_size: int, inv_freq: list[Array] | None) -> Array:
    """Compute `page_vectors` with zeros for pages on other devices."""
    vectors: list[Array] = []
    for layer, cache in enumerate(layers):
        if pages.shape[1] > 1:  # one layer after the other: all together may not fit the device
            cache, vectors[-1:] = lax.optimization_barrier((cache, vectors[-1:]))
            cache = cache.resident()
        run = functools.partial(_of_layer, cache, page_size, None if inv_freq is None else inv_freq[layer])
        vectors.append(jnp.moveaxis(join_pieces(run, _PAGES, pages), 3, 1))
    return jnp.stack(vectors, axis=3).reshape(*pages.shape, -1)  # [B, P, H, L, D]


def _of_layer(cache: LayerCache, page_size: int, inv_freq: Array | None, pages: Array) -> Array:
    """Average the keys of each of ``pages`` int32 [B, P]: float32 [B, H, D, P]."""
    slots = page_slots(pages, page_size)
    index, inside = here(slots, slots < cache.row_slots, cache)
    index = jnp.where(inside, index, 0)
    present = (jnp.take_along_axis(cache.valid, index[:, None], axis=2) & inside[:, None])[..., None]
    key = jnp.where(present, cache.keys_between(index), 0).astype(jnp.float32)
    if inv_freq is not None:
        key = rotate(key, -slots[:, None], inv_freq)
    shape = (*key.shape[:2], pages.shape[1], page_size)
    count = present.reshape(*shape, 1).sum(axis=3).astype(jnp.float32)
    return (key.reshape(*shape, -1).sum(axis=3) / jnp.maximum(count, 1.0)).swapaxes(2, 3)


def build(layers: list[LayerCache], shape: Shape, complete: Array, inv_freq: list[Array] | None) -> Nodes:
    """Build the whole tree over the first ``complete`` int32 [B] pages from the stored keys."""
    cache, dtype = layers[0], layers[0].key.dtype
    count, chunks, grids = shape.counts(cache.row_slots)
    pages = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None], (complete.shape[0], count))
    if cache.parts == 1:
        vectors = page_vectors(layers, pages, shape.page_size, inv_freq)
    else:
        size = cache.num_slots // shape.page_size
        own = lax.dynamic_slice_in_dim(pages, cache.first // shape.page_size, size, 1)
        vectors = axes.joined(_own_vectors(layers, own, shape.page_size, inv_freq), 1, axes.SLOTS)
    vectors = jnp.where((pages < complete[:, None])[..., None], vectors, 0).astype(dtype)
    if shape.fan is None:
        return Nodes(mean_keys=vectors, shape=shape)
    in_chunks = _means(vectors, complete, shape.fan[0], chunks)
    in_grids = _means(in_chunks, -(-complete // shape.fan[0]), shape.fan[1], grids)
    return Nodes(mean_keys=jnp.concatenate([vectors, in_chunks, in_grids], axis=1), shape=shape)


def with_parents(nodes: Nodes, page: Array, vector: Array) -> Array:
    """Compute the vectors that a page which has just become complete gives to itself, its chunk and its grid.

    Args:
        page: int32 [B], the number of the page.
        vector: float32 [B, N].

    Returns:
        [B, 3, N] in the dtype of the tree, or [B, 1, N] of a flat tree: what `build` makes of them.
    """
    own = vector.astype(nodes.mean_keys.dtype)[:, None]
    levels, first = [own], 0
    for fan, number in zip(nodes.shape.fan or (), nodes.counts, strict=False):
        page, child = page // fan, page
        at = page[:, None] * fan + jnp.arange(fan, dtype=jnp.int32)[None]
        members = jnp.take_along_axis(nodes.mean_keys, (first + jnp.minimum(at, number - 1))[..., None], axis=1)
        members = jnp.where((at == child[:, None])[..., None], own, members)
        own = _mean(members[:, None], (at <= child[:, None])[:, None])[:, 0][:, None]
        levels.append(own)
        first += number
    return jnp.concatenate(levels, axis=1)


def put_page(nodes: Nodes, page: Array, vectors: Array, when: Array) -> Nodes:
    """Write `with_parents` of ``page`` int32 [B] in rows ``when`` bool [B]: in place, by one launch for all levels."""
    at, first, past = [], 0, nodes.mean_keys.shape[1]  # no node has the index `past`, so a write to it is dropped
    for fan, number in zip((1, *(nodes.shape.fan or ())), nodes.counts, strict=False):
        page = page // fan
        at.append(jnp.where(when, first + page, past))
        first += number
    row = jnp.arange(page.shape[0])[:, None]
    return dataclasses.replace(nodes, mean_keys=nodes.mean_keys.at[row, jnp.stack(at, axis=1)].set(vectors, mode="drop"))


def mean_page(nodes: Nodes, complete: Array) -> Array:
    """Average the vectors of the first ``complete`` int32 [B] pages: float32 [B, N], zeros where no page exists."""
    exists = (jnp.arange(nodes.pages.shape[1], dtype=jnp.int32)[None] < complete[:, None])[..., None]
    total = jnp.where(exists, nodes.pages.astype(jnp.float32), 0).sum(axis=1)
    return total / jnp.maximum(complete, 1)[:, None].astype(jnp.float32)


def cascade(
    grids: Array, chunks: Array, pages: Array, candidate: Array, ratios: Triple, pages_per_chunk: int, chunks_per_grid: int
) -> Array:
    """Select pages by three cuts: a share of the grids, of the kept grids' chunks, and of the kept chunks' pages.

    Each cut keeps ``ceil(ratio * candidates)`` nodes, at least 1. In a tie the lower index is kept. A chunk is a candidate if
    one of its pages is, and a grid if one of its chunks is.

    Args:
        grids: float32 [B, grids], score of each grid.
        chunks: float32 [B, chunks], score of each chunk.
        pages: float32 [B, P], score of each page.
        candidate: bool [B, P], pages to select from.

    Returns:
        Whether each page is left, bool [B, P].
    """
    among_chunks = _any_child(candidate, pages_per_chunk, chunks.shape[1])
    among_grids = _any_child(among_chunks, chunks_per_grid, grids.shape[1])
    kept = _best(grids, among_grids, ratios[0])
    kept = _best(chunks, _children(kept, chunks_per_grid, chunks.shape[1]) & among_chunks, ratios[1])
    return _best(pages, _children(kept, pages_per_chunk, pages.shape[1]) & candidate, ratios[2])


def best_pages(pages: Array, candidate: Array, ratios: Triple) -> Array:
    """Select pages without grids and chunks: the product of the ratios is the share of candidates that is kept, at least 1.

    Args:
        pages: float32 [B, P], score of each page.
        candidate: bool [B, P], pages to select from.

    Returns:
        Whether each page is left, bool [B, P].
    """
    return _best(pages, candidate, ratios[0] * ratios[1] * ratios[2])


def most_pages(num_slots: int, shape: Shape, ratios: tuple[float, float, float]) -> int:
    """Compute the most pages that a selection can keep in a cache of ``num_slots`` slots with these ``ratios``."""
    pages, chunks, grids = shape.counts(num_slots)
    if shape.fan is None:
        return share(math.prod(ratios), pages)
    for_grids = share(ratios[0], grids)
    for_chunks = share(ratios[1], min(chunks, for_grids * shape.fan[1]))
    return share(ratios[2], min(pages, for_chunks * shape.fan[0]))


def _best(score: Array, candidate: Array, ratio: float | Array) -> Array:
    keep = share(ratio, jnp.sum(candidate, axis=1, dtype=jnp.int32))
    order = jnp.argsort(jnp.where(candidate, -score, jnp.inf), axis=1, stable=True)
    row = jnp.arange(score.shape[0])[:, None]
    among = jnp.arange(score.shape[1], dtype=jnp.int32)[None] < keep[:, None]
    return jnp.zeros(score.shape, bool).at[row, order].set(among) & candidate


def _any_child(children: Array, fan: int, number: int) -> Array:
    padded = jnp.pad(children, ((0, 0), (0, number * fan - children.shape[1])))
    return padded.reshape(-1, number, fan).any(axis=2)


def _children(kept: Array, fan: int, number: int) -> Array:
    return jnp.repeat(kept, fan, axis=1)[:, :number]


def _means(children: Array, count: Array, fan: int, number: int) -> Array:
    """Compute the vectors of ``number`` parents [B, number, N]; the first ``count`` of the children [B, n, N] exist."""
    padded = jnp.pad(children, ((0, 0), (0, number * fan - children.shape[1]), (0, 0)))
    exists = jnp.arange(number * fan, dtype=jnp.int32)[None] < count[:, None]
    return _mean(padded.reshape(len(padded), number, fan, -1), exists.reshape(-1, number, fan))


def _mean(members: Array, exists: Array) -> Array:
    """Average the members that exist: [B, n, fan, N] and bool [B, n, fan] to [B, n, N], in the members' dtype."""
    total = jnp.where(exists[..., None], members.astype(jnp.float32), 0).sum(axis=2)
    count = jnp.sum(exists, axis=2)[..., None].astype(jnp.float32)
    return (total / jnp.maximum(count, 1.0)).astype(members.dtype)


def score_nodes(nodes: Nodes, anchor: Array) -> tuple[Array, Array, Array]:
    """Multiply an anchor float32 [B, N] with every node, in one matrix product: float32 per page, chunk and grid."""
    score = jnp.einsum(
        "bn,bpn->bp",
        anchor.astype(nodes.mean_keys.dtype),
        nodes.mean_keys,
        preferred_element_type=jnp.float32,
        precision=lax.Precision.HIGHEST,
    )
    return nodes.split(axes.total(score))  # devices that share the heads have parts of N
