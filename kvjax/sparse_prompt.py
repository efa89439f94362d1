"""Which keys the queries of a prompt chunk attend to under `kvjax.patterns.Pattern`s, and attention over them.

The lists are made of the chunk itself. Columns and diagonals are the same for all queries of a head, so a head has one list
of columns and one of distances in blocks; only the pattern "block_sparse" has a list for each block of queries. No array has
an axis of queries beside one of keys, but for a few queries at a time.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array, lax

from kvjax.patterns import Pattern
from kvjax.typing import pytree
from pallas_kernels import axes
from pallas_kernels.compact import compact
from pallas_kernels.kth_select import kth_select
from pallas_kernels.numerics import finite_or_zero, product_precision
from pallas_kernels.sparse_attention import sparse_attention

_LOGITS = 1 << 26  # the most logits of the window that are in memory at once
_POOLED = 64  # blocks of queries that choose their blocks of keys at once


@pytree
class Lists:
    """The lists of `pallas_kernels.sparse_attention.sparse_attention`, for N blocks of queries."""

    distances: Array  # int32 [B, H, G, L]
    first: Array  # int32 [B, H, G, N]
    count: Array  # int32 [B, H, G, N]
    columns: Array  # int32 [B, H, G, C]
    num_columns: Array  # int32 [B, H, G]


@dataclasses.dataclass(frozen=True)
class SparsePrompt:
    """How a layer reads a prompt.

    Attributes:
        heads: the pattern of each query head, or one for all of them.
        window: queries at the end of a chunk that vote for columns and diagonals.
        num_sink: first tokens that are columns for certain.
        num_recent: shortest distances that are diagonals for certain.
        block: tokens of a block.
    """

    heads: tuple[Pattern, ...]
    window: int
    num_sink: int
    num_recent: int
    block: int

    def covers(self, slots: int) -> bool:
        """Whether every pattern has room for all of ``slots`` tokens, so that attention is dense."""
        return all(
            pattern.blocks * self.block >= slots
            if pattern.kind == "block_sparse"
            else max(pattern.columns, pattern.diagonals) >= slots
            for pattern in self.heads
        )

    def attend(
        self, query: Array, key: Array, value: Array, start: Array | int, length: Array
    ) -> tuple[Array, Array]:
        """Attention of a prompt chunk over what the patterns choose.

        Args:
            query: [B, H, G, T, D], rotated.
            key: [B, H, S, D], rotated; those of the chunk are at ``start`` and behind.
            value: [B, H, S, D].
            start: slot of the chunk's first token.
            length: int32 [B], tokens of the chunk that are real; what belongs to the others may be anything.

        Returns:
            out [B, H, G, T, D] and lse float32 [B, H, G, T]; 0 and -inf for queries that are not real.

        Raises:
            ValueError: the chunk would begin inside of a block.
        """
        if query.shape[3] % self.block and not isinstance(start, int):
            raise ValueError(
                f"Prefill: prompts must be read in pieces of whole blocks of {self.block} tokens, but another layer reads "
                f"{query.shape[3]} at once"
            )
        lists = self.lists(query, key, start, length)
        return sparse_attention(
            query,
            key,
            value,
            **vars(lists),
            start=start,
            length=length,
            block=self.block,
            scale=1 / math.sqrt(query.shape[-1]),
        )

    def lists(self, query: Array, key: Array, start: Array | int, length: Array) -> Lists:
        """The lists of a prompt chunk; arguments as for `attend`."""
        batch, heads, group, tokens, _ = query.shape
        slots, blocks = key.shape[2], -(-tokens // self.block)
        total, own = start + length, jnp.asarray(start, jnp.int32) // self.block
        slot = jnp.arange(slots, dtype=jnp.int32).reshape(1, 1, 1, -1)
        votes = jnp.zeros((2, batch, heads, group, slots), jnp.float32)
        if any(pattern.kind == "vertical_slash" for pattern in self.heads):
            votes = jnp.stack(self._votes(query, key, start, length))

        def number(each: list[int]) -> Array:
            """Numbers of the patterns for the heads here: int32 [H * G], or [1] of one pattern."""
            made = jnp.asarray(each, jnp.int32)
            own = heads * group
            return made if len(each) == 1 else lax.dynamic_slice_in_dim(made, axes.index(axes.MODEL) * own, own)

        def per_head(each: list[bool]) -> Array:
            """bool [1, H, G, 1] or [1, 1, 1, 1]."""
            made = number([int(x) for x in each]) > 0
            return made.reshape(1, *((heads, group) if len(each) > 1 else (1, 1)), 1)

        def choose(votes: Array, certain: int, most: list[int]) -> tuple[Array, Array]:
            """The best entries of ``votes`` [B, H, G, S], ascending, and their numbers; A-shapes choose the first ones."""
            score = jnp.where(slot < certain, jnp.inf, votes)
            score = jnp.where(per_head([p.kind == "a_shape" for p in self.heads]), -slot.astype(jnp.float32), score)
            score = jnp.where(slot < total[:, None, None, None], score, -jnp.inf).reshape(batch, -1, slots)
            listed, count = kth_select(score, number(most)[None], max(1, min(max(most), slots)))
            return listed.reshape(batch, heads, group, -1), count.reshape(batch, heads, group)

        vote = [pattern.kind == "vertical_slash" for pattern in self.heads]
        by_block = [pattern.kind == "block_sparse" for pattern in self.heads]
        columns, num_columns = choose(
            votes[0],
            self.num_sink,
            [
                0 if is_block else max(pattern.columns, self.num_sink * is_vote)
                for pattern, is_vote, is_block in zip(self.heads, vote, by_block, strict=True)
            ],
        )
        diagonals, num_diagonals = choose(
            votes[1],
            self.num_recent,
            [
                0 if is_block else max(pattern.diagonals, self.num_recent * is_vote)
                for pattern, is_vote, is_block in zip(self.heads, vote, by_block, strict=True)
            ],
        )
        distances, cumulative = self._distances(diagonals, num_diagonals, slots)
        count = lax.dynamic_slice_in_dim(cumulative, own, blocks, 3)
        first = jnp.zeros_like(count)
        if any(by_block):
            back, number_of, most = self._best_blocks(query, key, own, length)
            flat = back.reshape(batch, heads, group, -1)
            wide = max(flat.shape[3], distances.shape[3])
            flat, distances = (jnp.pad(x, [(0, 0)] * 3 + [(0, wide - x.shape[3])]) for x in (flat, distances))
            mine = per_head(by_block)
            distances = jnp.where(mine, flat, distances)
            first = jnp.where(mine, (most * jnp.arange(blocks, dtype=jnp.int32)).reshape(1, 1, 1, -1), first)
            count = jnp.where(mine, number_of, count)
        return Lists(
            distances=distances, first=first, count=count, columns=columns, num_columns=num_columns
        )

    def _votes(self, query: Array, key: Array, start: Array | int, length: Array) -> tuple[Array, Array]:
        """Attention of the chunk's last queries, summed for each key and for each distance: float32 [B, H, G, S] both."""
        window, slots = min(self.window, query.shape[3]), key.shape[2]
        index = length[:, None] - window + jnp.arange(window, dtype=jnp.int32)[None]
        asked = jnp.where(index >= 0, start + index, -1)
        query = jnp.take_along_axis(query, jnp.maximum(index, 0)[:, None, None, :, None], axis=3)
        shape, scale = query.shape[:4], 1 / math.sqrt(query.shape[4])
        width = min(slots, max(256, min(8192, _LOGITS // math.prod(shape))))
        stop = (jnp.max(start + length) + width - 1) // width

        def logits(step: Array) -> tuple[Array, Array]:
            """The first slot of a step, and its logits [B, H, G, W, width]."""
            # If the width does not divide S, the last step starts early; slots that the step before had are hidden.
            low = jnp.minimum(step * width, slots - width)
            slot = low + jnp.arange(width, dtype=jnp.int32)
            part = lax.dynamic_slice_in_dim(key, low, width, 2)
            made = scale * jnp.einsum(
                "bhgwd,bhsd->bhgws",
                query,
                part,
                precision=product_precision(query.dtype),
                preferred_element_type=jnp.float32,
            )
            seen = (slot[None, None] <= asked[..., None]) & (slot >= step * width)[None, None]
            return low, jnp.where(seen[:, None, None], made, -jnp.inf)

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
            # with a width of one less than they have.
            skewed = jnp.pad(chance[..., ::-1], [(0, 0)] * 4 + [(0, window)]).reshape(*shape[:3], -1)
            skewed = skewed[..., : window * (width + window - 1)].reshape(*shape, width + window - 1)
            return _add_at(columns, chance.sum(axis=3), low), _add_at(diagonals, skewed.sum(axis=3), slots - width - low)

        carry = tuple(jnp.zeros((*shape[:3], size), jnp.float32) for size in (slots, slots + window - 1))
        columns, diagonals = lax.fori_loop(0, stop, add_votes, carry)
        # The last query asks at the newest slot; distance d from it is entry d - newest + S + W - 2.
        newest = (start + length - 1)[:, None, None, None]
        at = jnp.arange(slots, dtype=jnp.int32).reshape(1, 1, 1, -1) - newest + slots + window - 2
        return columns, jnp.take_along_axis(diagonals, at, axis=3, mode="clip")

    def _distances(self, diagonals: Array, number: Array, slots: int) -> tuple[Array, Array]:
        """Distances of the blocks that diagonals pass through, and how many are at most 0, 1, ...: int32 [B, H, G, P]."""
        blocks = -(-slots // self.block)
        lists = diagonals.reshape(-1, diagonals.shape[3])
        listed = jnp.arange(lists.shape[1], dtype=jnp.int32)[None] < number.reshape(-1, 1)
        row, passed = jnp.arange(len(lists), dtype=jnp.int32)[:, None], jnp.zeros((len(lists), blocks), bool)
        for near in (lists // self.block, (lists + self.block - 1) // self.block):
            passed = passed.at[row, jnp.where(listed, near, blocks)].set(True, mode="drop")
        passed = passed.at[:, 0].set(False)  # the own block is always read
        distances, _ = compact(passed, blocks)
        shape = (*diagonals.shape[:3], blocks)
        return distances.reshape(shape), jnp.cumsum(passed, axis=1, dtype=jnp.int32).reshape(shape)

    def _best_blocks(self, query: Array, key: Array, own: Array, length: Array) -> tuple[Array, Array, int]:
        """For each block of queries the distances of its best blocks but its own, how many, and how many there can be."""
        batch, heads, group, tokens, dim = query.shape
        size, full = self.block, key.shape[2] // self.block
        blocks, key_blocks = -(-tokens // size), -(-key.shape[2] // size)
        most = min(max(p.blocks for p in self.heads if p.kind == "block_sparse"), key_blocks)
        steps = -(-blocks // _POOLED)
        real = (jnp.arange(tokens, dtype=jnp.int32)[None] < length[:, None])[:, None, None, :, None]
        padded = [(0, 0)] * 3 + [(0, steps * _POOLED * size - tokens), (0, 0)]
        pooled = jnp.pad(jnp.where(real, query, 0), padded).reshape(batch, heads, group, steps * _POOLED, size, dim)
        pooled = pooled.mean(axis=4, dtype=jnp.float32).astype(query.dtype)
        of_keys = key[:, :, : full * size].reshape(batch, heads, full, size, dim)
        of_keys = of_keys.mean(axis=3, dtype=jnp.float32).astype(key.dtype)
        limit = jnp.asarray([p.blocks for p in self.heads], jnp.int32)  # of each head, or of all

        def choose(step: Array) -> tuple[Array, Array]:
            asked = lax.dynamic_slice_in_dim(pooled, step * _POOLED, _POOLED, 3)
            at = own + step * _POOLED + jnp.arange(_POOLED, dtype=jnp.int32)
            score = jnp.einsum(
                "bhgtd,bhsd->bhgts",
                asked,
                of_keys,
                precision=product_precision(query.dtype),
                preferred_element_type=jnp.float32,
            )
            score = jnp.pad(score, [(0, 0)] * 4 + [(0, key_blocks - full)])
            back = (at[:, None] - jnp.arange(key_blocks, dtype=jnp.int32)[None])[None, None, None]
            score = jnp.where(back > 0, score, jnp.where(back == 0, jnp.inf, -jnp.inf))
            mine = limit
            if len(self.heads) > 1:
                mine = lax.dynamic_slice_in_dim(limit, axes.index(axes.MODEL) * heads * group, heads * group)
            best = jnp.repeat(jnp.broadcast_to(mine, (heads * group,)), _POOLED)[None]
            listed, count = kth_select(score.reshape(batch, -1, key_blocks), best, most)
            shape = batch, heads, group, _POOLED
            # The own block is the last of the ascending list.
            return at.reshape(1, 1, 1, -1, 1) - listed.reshape(*shape, most), count.reshape(shape) - 1

        back, count = lax.map(choose, jnp.arange(steps, dtype=jnp.int32))
        back = jnp.moveaxis(back, 0, 3).reshape(batch, heads, group, -1, most)[:, :, :, :blocks]
        count = jnp.moveaxis(count, 0, 3).reshape(batch, heads, group, -1)[..., :blocks]
        return back, jnp.maximum(count, 0), most


def _add_at(sums: Array, new: Array, at: Array) -> Array:
    """``sums`` [..., S] with ``new`` [..., N] added from entry ``at`` on."""
    old = lax.dynamic_slice_in_dim(sums, at, new.shape[-1], sums.ndim - 1)
    return lax.dynamic_update_slice_in_dim(sums, old + new, at, sums.ndim - 1)
