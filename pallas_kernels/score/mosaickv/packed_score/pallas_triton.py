"""Scores of packed vectors as one Pallas Triton kernel: a vector per thread, its products with all query heads."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_list
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.packed_vectors import check_format, owner_of, product_tile, query_table
from pallas_kernels._triton.pallas import pl, plt


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        tile: vectors per step, a power of two; with 32 per warp every thread has one.
        tiles: steps per program.
        num_warps: warps per program.
    """

    tile: int = 128
    tiles: int = 1
    num_warps: int = 4


def _kernel(
    table_ref, values_ref, words_ref, count_ref, last_ref, *refs, tile, tiles, span, unit, dim, group, padded, reduce
):
    # Of one list: table [M * D * Gp]; values [P * r]; words [P, W]; score [P] or [Gp, P].
    # Of its row: count and last [1]; owner [P] if given.
    *owner_ref, score_ref = refs
    owner_ref = owner_ref[0] if owner_ref else None
    count, blocks, begin = count_ref[0] // unit, words_ref.shape[0], pl.program_id(1) * tiles

    def add_tile(step, _):
        row = (begin + step) * tile + jnp.arange(tile, dtype=jnp.int32)
        # Threads behind the last vector read that vector again; their scores become -inf below.
        read = jnp.minimum(row, jnp.maximum(count - 1, 0))
        first = owner_of(read, owner_ref, last_ref, span) * dim
        score = product_tile(table_ref, values_ref, words_ref, read, first, padded)
        # Heads that pad the group to a power of two must not enter the maximum or the mean.
        head = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32)[None], score.shape)
        if reduce == "max":
            score = jnp.max(jnp.where(head < group, score, -jnp.inf), axis=1)
        elif reduce == "mean":
            score = jnp.sum(jnp.where(head < group, score, 0.0), axis=1) / group
        else:
            row = jnp.broadcast_to(row[:, None], score.shape)
        # Vectors from the count on get -inf; entries past the last vector are not written.
        at = (row,) if reduce is not None else (head, row)
        plt.store(score_ref.at[at], jnp.where(row < count, score, -jnp.inf), mask=row < blocks)
        return 0

    lax.fori_loop(0, tiles, add_tile, 0)


def packed_score(
    parts, values, bitmap, count, last, *, span, unit, owner, reduce, config: Config | None = None, interpret=False
):
    """Multiply queries with packed vectors in the basis of each segment; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    rows, heads, _, group, _, dim = parts.shape
    blocks, lists, padded = values.shape[2], rows * heads, pl.next_power_of_2(group)
    operands = [query_table(parts), values.reshape(lists, -1), bitmap.reshape(lists, blocks, -1)]
    per_row = [count.reshape(rows, 1), last.reshape(rows, 1)] + ([] if owner is None else [owner])
    shape = (blocks,) if reduce is not None else (padded, blocks)
    scores = jax.ShapeDtypeStruct((lists, *shape), jnp.float32)
    score = triton_call(
        functools.partial(
            _kernel,
            tile=config.tile,
            tiles=config.tiles,
            span=span,
            unit=unit,
            dim=dim,
            group=group,
            padded=padded,
            reduce=reduce,
        ),
        grid=(lists, pl.cdiv(blocks, config.tile * config.tiles)),
        in_specs=[of_list(x, 1) for x in operands] + [of_list(x, heads) for x in per_row],
        out_specs=of_list(scores, 1),
        out_shape=scores,
        name="packed_score",
        num_warps=config.num_warps,
        interpret=interpret,
    )(*operands, *per_row).reshape(rows, heads, *shape)
    return score if reduce is not None else score[:, :, :group]


def check(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """Raise ``NotImplementedError`` for head dims and dtypes that the kernel does not take."""
    check_format(parts.shape[-1], parts.dtype, values.dtype)
