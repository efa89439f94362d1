"""Sparse attention of a prompt chunk: which keys `kvjax.attention.patterns.Pattern`s choose, and attention over them.

Keys, distances, or blocks are marked first, and the lists are made of the marks. Columns and diagonals are the same for all
queries of a head, so a head has one list of columns and one list of distances in blocks. Only a head whose blocks of queries
choose blocks of keys has a list for each block of queries. No array has both an axis of queries and an axis of keys, except
for a few queries at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.estimates import antidiagonal_scores, block_means, divergence, kept_by_share, mean_logits
from kvjax.attention.patterns import KINDS, Pattern
from kvjax.protocol.typing import pytree
from kvjax.selection import among_best
from pallas_kernels import axes
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.attend.sparse_attention import sparse_attention
from pallas_kernels.choose.compact import compact
from pallas_kernels.numerics import finite_or_zero, product_precision
from pallas_kernels.soft_cap import capped

_LOGITS = 1 << 26  # the most logits of the window that are in memory at once


@pytree
class Lists:
    """The lists of `pallas_kernels.attend.sparse_attention.sparse_attention`, for N blocks of queries."""

    distances: Array  # int32 [B, H, G, L]
    first: Array  # int32 [B, H, G, N]
    count: Array  # int32 [B, H, G, N]
    columns: Array  # int32 [B, H, G, C]
    num_columns: Array  # int32 [B, H, G]


@dataclasses.dataclass(frozen=True)
class SparsePrompt:
    """The sparse attention of a layer over a prompt.

    Attributes:
        heads: the pattern of each query head, or one pattern for all.
        window: queries at the end of a chunk that vote for columns and diagonals.
        num_sink: first tokens that are columns for certain.
        num_recent: shortest distances that are diagonals for certain.
        block: tokens of a block.
        stride: tokens of an antidiagonal's piece.
    """

    heads: tuple[Pattern, ...]
    window: int
    num_sink: int
    num_recent: int
    block: int
    stride: int

    def covers(self, slots: int) -> bool:
        """Tell whether every pattern has room for all of ``slots`` tokens, so that attention is dense."""
        return all(pattern.covers(slots, self.block) for pattern in self.heads)

    def attend(self, query: Array, key: Array, value: Array, start: Array | int, length: Array) -> tuple[Array, Array]:
        """Attend with a prompt chunk to the keys that the patterns choose.

        Args:
            query: [B, H, G, T, D], rotated.
            key: [B, H, S, D], rotated; the chunk's keys begin at slot ``start``.
            value: [B, H, S, D].
            length: int32 [B], real tokens of the chunk; queries, keys and values of padding may be anything.

        Returns:
            out [B, H, G, T, D] and lse float32 [B, H, G, T]; 0 and -inf for queries that are not real.

        Raises:
            ValueError: the chunk would begin inside of a block.
        """
        if query.shape[3] % self.block and not isinstance(start, int):
            raise ValueError(
                f"Prefill: prompt chunks must be whole blocks of {self.block} tokens, got chunks of {query.shape[3]} tokens, "
                "which another layer needs"
            )
        given = {"start": start, "length": length, "scale": 1 / math.sqrt(query.shape[-1])}
        each, found = functools.partial(self._each, query.shape), None
        if self._has("blasst"):
            total = (start + length).astype(jnp.float32)[:, None, None]
            threshold = jnp.log(jnp.maximum(total / each(lambda x: x.factor).astype(jnp.float32), 1))
            filled = (jnp.pad(x, [(0, 0)] * 2 + [(0, -x.shape[2] % 8), (0, 0)]) for x in (key, value))  # as kernels want it
            found = prefix_attention(query, *filled, **given, threshold=jnp.broadcast_to(threshold, query.shape[:3]))
            if not self._has(*KINDS.keys() - {"blasst"}):
                return found
        listed = sparse_attention(query, key, value, **vars(self.lists(query, key, start, length)), **given, block=self.block)
        if found is None:
            return listed
        mine = each(lambda x: x.kind == "blasst")[..., None]
        return jnp.where(mine[..., None], found[0], listed[0]), jnp.where(mine, found[1], listed[1])

    def _each(self, shape: tuple[int, ...], read: Callable[[Pattern], Any]) -> Array:
        """Read a value of each pattern, for this device's heads in queries of a shape: [1, H, G], or [1, 1, 1] for one."""
        _, heads, group, *_ = shape
        values = jnp.asarray([read(pattern) for pattern in self.heads])
        if len(self.heads) > 1:
            values = lax.dynamic_slice_in_dim(values, axes.index(axes.MODEL) * heads * group, heads * group)
            return values.reshape(1, heads, group)
        return values.reshape(1, 1, 1)

    def lists(self, query: Array, key: Array, start: Array | int, length: Array) -> Lists:
        """Build the lists of a prompt chunk; arguments as for `attend`.

        Where the text decides how long the lists are, they have room for everything: 4 * N * P bytes for each query head that
        chooses by blocks, for N blocks of queries in the chunk and P blocks of keys in the cache. The kernel's work follows
        the counts.
        """
        batch, heads, group, tokens, _ = query.shape
        slots, blocks, key_blocks = key.shape[2], -(-tokens // self.block), -(-key.shape[2] // self.block)
        total, own = start + length, jnp.asarray(start, jnp.int32) // self.block
        slot = jnp.arange(slots, dtype=jnp.int32).reshape(1, 1, 1, -1)
        here = slot < total[:, None, None, None]

        each = functools.partial(self._each, query.shape)
        votes = jnp.zeros((2, batch, heads, group, slots), jnp.float32)
        if self._has("vertical_slash", "flexprefill"):
            votes = jnp.stack(self._votes(query, key, start, length))
        by_block, by_share = (
            each(lambda x: x.kind in ("block_sparse", "xattention")),
            each(lambda x: x.kind == "flexprefill"),
        )
        if self._has("flexprefill"):
            aware = self._estimate_error(query, key, votes[0], total, length) < each(lambda x: x.tau)
            by_block = by_block | (by_share & aware)

        def chosen(votes: Array, certain: int, most: Callable[[Pattern], int]) -> Array:
            """Mark the best entries of ``votes``, bool [B, H, G, S]; A-shapes mark the first entries."""
            score = jnp.where(slot < certain, jnp.inf, votes)
            score = jnp.where(each(lambda x: x.kind == "a_shape")[..., None], -slot.astype(jnp.float32), score)
            score = jnp.where(here, score, -jnp.inf).reshape(batch, -1, slots)
            number = jnp.broadcast_to(jnp.where(by_block, 0, each(most)), (batch, heads, group)).reshape(batch, -1)
            marks = among_best(score, number, max(1, *map(most, self.heads))).reshape(votes.shape)
            if self._has("flexprefill"):
                # Past the tokens there are no distances, and votes there mean nothing.
                enough = kept_by_share(jnp.where(here, votes, 0), slot < certain, each(lambda x: x.share)) & here
                marks = marks | ((by_share & ~by_block)[..., None] & enough)
            return marks

        def most_of(given: str, certain: int) -> Callable[[Pattern], int]:
            def most(pattern: Pattern) -> int:
                match pattern.kind:
                    case "vertical_slash":
                        return max(vars(pattern)[given], certain)
                    case "a_shape":
                        return vars(pattern)[given]
                    case "flexprefill":
                        return max(pattern.min_budget, certain)
                return 0

            return most

        most = most_of("columns", self.num_sink)
        room = slots if self._has("flexprefill") else min(slots, max(1, *map(most, self.heads)))
        columns, listed = compact(chosen(votes[0], self.num_sink, most), room)
        passed = self._passed(chosen(votes[1], self.num_recent, most_of("diagonals", self.num_recent)))
        distances, _ = compact(passed, key_blocks)
        count = lax.dynamic_slice_in_dim(jnp.cumsum(passed, axis=3, dtype=jnp.int32), own, blocks, 3)
        first = jnp.zeros_like(count)
        if self._has("block_sparse", "xattention", "flexprefill"):
            marks, most_blocks = self._best_blocks(query, key, own, total, each)
            at = own + jnp.arange(blocks, dtype=jnp.int32).reshape(1, 1, 1, -1, 1)
            flat = (at - compact(marks, most_blocks)[0]).reshape(batch, heads, group, -1)
            wide = max(flat.shape[3], distances.shape[3])
            flat, distances = (jnp.pad(x, [(0, 0)] * 3 + [(0, wide - x.shape[3])]) for x in (flat, distances))
            mine = by_block[..., None]
            distances = jnp.where(mine, flat, distances)
            first = jnp.where(mine, most_blocks * (at[..., 0] - own), first)
            count = jnp.where(mine, marks.sum(axis=4, dtype=jnp.int32), count)
        return Lists(
            distances=distances, first=first, count=count, columns=columns, num_columns=listed.sum(axis=3, dtype=jnp.int32)
        )

    def _has(self, *kinds: str) -> bool:
        return any(pattern.kind in kinds for pattern in self.heads)

    def _last(self, query: Array, length: Array) -> tuple[Array, Array]:
        """Take the chunk's last W queries [B, H, G, W, D] and their indices int32 [B, W]; a negative index does not exist."""
        window = min(self.window, query.shape[3])
        index = length[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
        return jnp.take_along_axis(query, jnp.maximum(index, 0)[:, None, None, :, None], axis=3), index

    def _votes(self, query: Array, key: Array, start: Array | int, length: Array) -> tuple[Array, Array]:
        """Sum the attention of the chunk's last queries for each key and for each distance: float32 [B, H, G, S] both."""
        window, slots = min(self.window, query.shape[3]), key.shape[2]
        query, index = self._last(query, length)
        asked = jnp.where(index >= 0, start + index, -1)
        shape, scale = query.shape[:4], 1 / math.sqrt(query.shape[4])
        width = min(slots, max(256, min(8192, _LOGITS // math.prod(shape))))
        stop = (jnp.max(start + length) + width - 1) // width

        def logits(step: Array) -> tuple[Array, Array]:
            """Compute the first slot of a step, and the step's logits [B, H, G, W, width]."""
            # If the width does not divide S, the last step starts early; slots of the previous step are hidden.
            low = jnp.minimum(step * width, slots - width)
            slot = low + jnp.arange(width, dtype=jnp.int32)
            part = lax.dynamic_slice_in_dim(key, low, width, 2)
            made = scale * jnp.einsum(
                "bhgwd,bhsd->bhgws", query, part, precision=product_precision(query.dtype), preferred_element_type=jnp.float32
            )
            seen = (slot[None, None] <= asked[..., None]) & (slot >= step * width)[None, None]
            return low, jnp.where(seen[:, None, None], capped(made), -jnp.inf)

        def add_total(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            sums, maximum = carry
            made = logits(step)[1]
            risen = jnp.maximum(maximum, made.max(axis=-1))
            shift = finite_or_zero(risen)
            return sums * jnp.exp(maximum - shift) + jnp.exp(made - shift[..., None]).sum(axis=-1), risen

        carry = jnp.zeros(shape, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)
        sums, maximum = lax.fori_loop(0, stop, add_total, carry)
        shift, share = finite_or_zero(maximum)[..., None], (1 / jnp.where(sums > 0, sums, 1))[..., None]

        def add_votes(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            columns, diagonals = carry
            low, made = logits(step)
            chance = jnp.exp(made - shift) * share
            # Query w and key s share entry w + S - 1 - s of the diagonals. To move row w by w entries, the rows are laid out
            # with a width that is one less than their own.
            skewed = jnp.pad(chance[..., ::-1], [(0, 0)] * 4 + [(0, window)]).reshape(*shape[:3], -1)
            skewed = skewed[..., : window * (width + window - 1)].reshape(*shape, width + window - 1)
            return _add_at(columns, chance.sum(axis=3), low), _add_at(diagonals, skewed.sum(axis=3), slots - width - low)

        carry = tuple(jnp.zeros((*shape[:3], size), jnp.float32) for size in (slots, slots + window - 1))
        columns, diagonals = lax.fori_loop(0, stop, add_votes, carry)
        # The last query asks at the newest slot; distance d from it is entry d - newest + S + W - 2.
        newest = (start + length - 1)[:, None, None, None]
        at = jnp.arange(slots, dtype=jnp.int32).reshape(1, 1, 1, -1) - newest + slots + window - 2
        return columns, jnp.take_along_axis(diagonals, at, axis=3, mode="clip")

    def _passed(self, diagonals: Array) -> Array:
        """Mark the distances of the blocks that marked diagonals pass through, without distance 0: bool [B, H, G, P]."""
        size, slots = self.block, diagonals.shape[3]
        blocks = -(-slots // size)

        def marked(behind: int) -> Array:
            """Mark the blocks that have a mark after all marks were moved right by ``behind`` entries."""
            moved = jnp.pad(diagonals, [(0, 0)] * 3 + [(behind, blocks * size)])[..., : blocks * size]
            return moved.reshape(*diagonals.shape[:3], blocks, size).any(axis=4)

        # Queries of a block see distance d in two blocks: d / size blocks before their own, rounded down and rounded up.
        return (marked(0) | marked(size - 1)).at[..., 0].set(False)

    def _estimate_error(self, query: Array, key: Array, columns: Array, total: Array, length: Array) -> Array:
        """Measure the error of block means for the attention of the chunk's last queries: `divergence`, float32 [B, H, G]."""
        size, slots = self.block, key.shape[2]
        blocks = -(-slots // size)
        last, index = self._last(query, length)
        mean = block_means(last, index >= 0, index.shape[1])
        keys = block_means(key, jnp.arange(slots, dtype=jnp.int32)[None] < total[:, None], size)
        there = (jnp.arange(blocks, dtype=jnp.int32)[None] * size < total[:, None])[:, None, None]
        estimate = jnp.where(there, mean_logits(mean, keys)[:, :, :, 0], -jnp.inf)
        padded = jnp.pad(columns, [(0, 0)] * 3 + [(0, blocks * size - slots)])
        return divergence(estimate, padded.reshape(*columns.shape[:3], blocks, size).sum(axis=4))

    def _best_blocks(
        self, query: Array, key: Array, own: Array, total: Array, each: Callable[[Callable[[Pattern], Any]], Array]
    ) -> tuple[Array, int]:
        """Mark each block's best blocks of keys but its own, bool [B, H, G, N, P]; return also the most marks in a row."""
        batch, heads, group, tokens, _ = query.shape
        size, slots = self.block, key.shape[2]
        blocks, key_blocks = -(-tokens // size), -(-slots // size)
        at = own + jnp.arange(blocks, dtype=jnp.int32)
        block = jnp.arange(key_blocks, dtype=jnp.int32)[None]
        back = (at[:, None] - block)[None, None, None]
        certain = (back == 0) | (block == 0)[None, None, None]
        marks = jnp.zeros((batch, heads, group, blocks, key_blocks), bool)

        def least(pattern: Pattern) -> int:
            """Count the blocks that each block of queries chooses by means, its own included."""
            match pattern.kind:
                case "block_sparse":
                    return min(pattern.blocks, key_blocks)
                case "flexprefill":
                    return min(-(-pattern.min_budget // size), key_blocks)
            return 0

        most = key_blocks if self._has("xattention", "flexprefill") else max(map(least, self.heads))
        share = each(lambda x: x.share)
        if self._has("block_sparse", "flexprefill"):
            slot = jnp.arange(max(tokens, slots), dtype=jnp.int32)[None]
            asking = block_means(query, own * size + slot[:, :tokens] < total[:, None], size)
            logits = mean_logits(asking, block_means(key, slot[:, :slots] < total[:, None], size))
            score = jnp.where(back == 0, jnp.inf, jnp.where(back > 0, logits, -jnp.inf))
            number = jnp.broadcast_to(each(least)[..., None], score.shape[:4]).reshape(batch, -1)
            marks = among_best(score.reshape(batch, -1, key_blocks), number, most).reshape(score.shape)
            if self._has("flexprefill"):
                real = (at[None] * size < total[:, None])[:, None, None, :, None]
                chance = jax.nn.softmax(jnp.where(back >= 0, logits, -jnp.inf), axis=4)
                # All blocks of queries share one sum: rows whose attention is spread out get more blocks than other rows.
                flat = jnp.where(real, chance, 0).reshape(batch, heads, group, -1)
                enough = kept_by_share(flat, certain.reshape(1, 1, 1, -1), share).reshape(score.shape)
                marks = marks | (each(lambda x: x.kind == "flexprefill")[..., None, None] & enough)
        if self._has("xattention"):
            found = antidiagonal_scores(query, key, own * size, total, size, self.stride)
            enough = kept_by_share(found, certain, share[..., None])
            marks = marks | (each(lambda x: x.kind == "xattention")[..., None, None] & enough)
        return marks & (back > 0), most


def _add_at(sums: Array, new: Array, at: Array) -> Array:
    """Add ``new`` [..., N] to ``sums`` [..., S] from entry ``at`` on."""
    old = lax.dynamic_slice_in_dim(sums, at, new.shape[-1], sums.ndim - 1)
    return lax.dynamic_update_slice_in_dim(sums, old + new, at, sums.ndim - 1)
