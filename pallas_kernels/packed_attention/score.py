"""Scores of packed block means as one Pallas Triton kernel, and the kernel that turns queries into every segment's basis."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.packed_attention.reference import PARTS
from pallas_kernels.packed_attention.tile import product_tile, query_table
from pallas_kernels.triton_call import triton_call

TURN = 16  # rows of a basis per program of `turn_query`


@dataclasses.dataclass(frozen=True)
class Config:
    """How the scores are cut.

    Attributes:
        tile: blocks at once, a power of two; with 32 per warp every thread has one.
        tiles: of a program.
        num_warps: warps per program.
    """

    tile: int = 128
    tiles: int = 1
    num_warps: int = 4


def _turn(query_ref, basis_ref, parts_ref, *, group):
    # query [H, G, D] and basis [H, M, D, D] of a row; parts [H, M, G, N, D]
    head, segment = pl.program_id(1) // basis_ref.shape[1], pl.program_id(1) % basis_ref.shape[1]
    row = pl.program_id(2) * TURN + jnp.arange(TURN, dtype=jnp.int32)
    basis = basis_ref[head, segment, row, :]
    padded = pl.next_power_of_2(group)
    queries = [query_ref[head, min(g, group - 1), :].astype(jnp.float32) for g in range(padded)]
    turned = [jnp.sum(basis * query[None], axis=1) for query in queries]
    # All heads are written at once: for every store the threads wait for each other.
    while len(turned) > 1:
        half = len(turned) // 2
        turned = [jnp.stack(pair, axis=-1) for pair in zip(turned[:half], turned[half:], strict=True)]
    rest = turned[0].reshape(TURN, padded)
    # What pads the heads is the last one again.
    number = jnp.minimum(jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32)[None], rest.shape), group - 1)
    row = jnp.broadcast_to(row[:, None], rest.shape)
    for part in range(parts_ref.shape[3]):
        term = rest.astype(parts_ref.dtype)
        if part == 3:
            term = jnp.zeros_like(term)
        plt.store(parts_ref.at[head, segment, number, part, row], term)
        rest = rest - term.astype(jnp.float32)


def turn_query(query, basis, *, dtype, interpret=False):
    """See ``pallas_kernels.packed_attention.turn_query``; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, group, dim = query.shape
    segments, terms = basis.shape[2], PARTS[str(dtype)]

    def spec(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, *shape), lambda b, i, j: (b,) + (0,) * len(shape))

    return triton_call(
        functools.partial(_turn, group=group),
        grid=(rows, heads * segments, dim // TURN),
        in_specs=[spec(heads, group, dim), spec(heads, segments, dim, dim)],
        out_specs=spec(heads, segments, group, terms, dim),
        out_shape=jax.ShapeDtypeStruct((rows, heads, segments, group, terms, dim), dtype),
        name="turn_query",
        interpret=interpret,
    )(query, basis)


def owner_of(blocks, owner_ref, last_ref, span):
    """Segments of ``blocks`` int32 [N] of a row, or of one block; see ``packed_score``."""
    if owner_ref is None:
        return jnp.minimum(blocks // span, last_ref[0])
    return owner_ref[jnp.clip(blocks, 0, owner_ref.shape[0] - 1)]


def _score(
    table_ref, values_ref, words_ref, count_ref, last_ref, *refs, tile, tiles, span, unit, dim, group, padded, reduce
):
    # table [M * D * Gp]; values [P * r]; words [P, W]; count and last [1]; owner [P]; score [P] or [Gp, P]
    *owner_ref, score_ref = refs
    owner_ref = owner_ref[0] if owner_ref else None
    count, blocks, begin = count_ref[0] // unit, words_ref.shape[0], pl.program_id(1) * tiles

    def add_tile(step, _):
        row = (begin + step) * tile + jnp.arange(tile, dtype=jnp.int32)
        read = jnp.minimum(row, jnp.maximum(count - 1, 0))
        first = owner_of(read, owner_ref, last_ref, span) * dim
        score = product_tile(table_ref, values_ref, words_ref, read, first, padded)
        head = jnp.broadcast_to(jnp.arange(padded, dtype=jnp.int32)[None], score.shape)
        if reduce == "max":
            score = jnp.max(jnp.where(head < group, score, -jnp.inf), axis=1)
        elif reduce == "mean":
            score = jnp.sum(jnp.where(head < group, score, 0.0), axis=1) / group
        else:
            row = jnp.broadcast_to(row[:, None], score.shape)
        at = (row,) if reduce is not None else (head, row)
        plt.store(score_ref.at[at], jnp.where(row < count, score, -jnp.inf), mask=row < blocks)
        return 0

    lax.fori_loop(0, tiles, add_tile, 0)


def packed_score(
    parts, values, bitmap, count, last, *, span, unit, owner, reduce, config: Config | None = None, interpret=False
):
    """See ``pallas_kernels.packed_attention.packed_score``; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    rows, heads, _, group, _, dim = parts.shape
    blocks, lists, padded = values.shape[2], rows * heads, pl.next_power_of_2(group)
    operands = [query_table(parts), values.reshape(lists, -1), bitmap.reshape(lists, blocks, -1)]
    per_row = [count.reshape(rows, 1), last.reshape(rows, 1)] + ([] if owner is None else [owner])
    shape = (blocks,) if reduce is not None else (padded, blocks)
    score = triton_call(
        functools.partial(
            _score,
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
        # A block spec only offsets a pointer here: no block is copied.
        in_specs=[pl.BlockSpec((None, *x.shape[1:]), lambda i, j, n=x.ndim: (i,) + (0,) * (n - 1)) for x in operands]
        + [pl.BlockSpec((None, x.shape[1]), lambda i, j: (i // heads, 0)) for x in per_row],
        out_specs=pl.BlockSpec((None, *shape), lambda i, j: (i,) + (0,) * len(shape)),
        out_shape=jax.ShapeDtypeStruct((lists, *shape), jnp.float32),
        name="packed_score",
        num_warps=config.num_warps,
        interpret=interpret,
    )(*operands, *per_row).reshape(rows, heads, *shape)
    return score if reduce is not None else score[:, :, :group]
