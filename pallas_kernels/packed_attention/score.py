"""Scores of packed block means as one Pallas Triton kernel, and the kernel that turns queries into every segment's basis."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.numerics import product_precision
from pallas_kernels.packed_attention.reference import PARTS
from pallas_kernels.packed_attention.tile import unpack_tile
from pallas_kernels.triton_call import triton_call

TURN = 16  # rows of a basis per program of `turn_query`


@dataclasses.dataclass(frozen=True)
class Config:
    """How the scores are cut.

    Attributes:
        tile: blocks unpacked at once, a power of two of at least 16.
        tiles: of a program.
        num_warps: warps per program.
    """

    tile: int = 64
    tiles: int = 1
    num_warps: int = 4


def _turn(query_ref, basis_ref, parts_ref, *, group):
    # query [H, G, D] and basis [H, M, D, D] of a row; parts [H, M, G, N, D]
    head, segment, at = pl.program_id(1) // basis_ref.shape[1], pl.program_id(1) % basis_ref.shape[1], pl.program_id(2)
    rows = pl.ds(at * TURN, TURN)
    basis = basis_ref[head, segment, rows, :]
    for g in range(group):
        rest = jnp.sum(basis * query_ref[head, g, :].astype(jnp.float32)[None], axis=1)
        for part in range(parts_ref.shape[3]):
            term = rest.astype(parts_ref.dtype)
            if part == 3:
                term = jnp.zeros_like(term)
            parts_ref[head, segment, g, part, rows] = term
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


def _score(parts_ref, values_ref, words_ref, count_ref, last_ref, *refs, tile, tiles, span, unit, group, reduce):
    # parts [M, Gp * N, D]; values [P * r]; words [P, W]; count and last [1]; owner [P]; score [P] or [Gp, P]
    *owner_ref, score_ref = refs
    owner_ref = owner_ref[0] if owner_ref else None
    count, blocks, begin = count_ref[0] // unit, words_ref.shape[0], pl.program_id(1) * tiles
    precision = product_precision(values_ref.dtype)

    def store(score, row):  # score [tile] or [tile, G]
        if reduce is not None:
            plt.store(score_ref.at[row], score, mask=row < blocks)
            return
        head = jnp.broadcast_to(jnp.arange(score.shape[1], dtype=jnp.int32)[None], score.shape)
        row = jnp.broadcast_to(row[:, None], score.shape)
        plt.store(score_ref.at[head, row], score, mask=row < blocks)

    def add_tile(step, _):
        first = (begin + step) * tile
        row = first + jnp.arange(tile, dtype=jnp.int32)
        vectors = unpack_tile(values_ref, words_ref, jnp.minimum(row, jnp.maximum(count - 1, 0)))
        segment = owner_of(row, owner_ref, last_ref, span)

        def scores(s):  # [tile, G]
            logits = plt.dot(vectors, parts_ref[s, :, :], trans_b=True, precision=precision)
            return jnp.sum(logits.reshape(tile, -1, PARTS[str(values_ref.dtype)]), axis=2)

        low, high = (owner_of(at, owner_ref, last_ref, span) for at in (first, jnp.minimum(first + tile, blocks) - 1))
        score = scores(low)
        # A tile rarely lies in several segments; their blocks ascend.
        score = jax.lax.fori_loop(
            low + 1, high + 1, lambda s, score: jnp.where((segment == s)[:, None], scores(s), score), score
        )
        here = jnp.broadcast_to(jnp.arange(score.shape[1], dtype=jnp.int32)[None] < group, score.shape)
        if reduce == "max":
            score = jnp.max(jnp.where(here, score, -jnp.inf), axis=1)
        elif reduce == "mean":
            score = jnp.sum(jnp.where(here, score, 0.0), axis=1) / group
        seen = row < count
        store(jnp.where(seen if reduce is not None else seen[:, None], score, -jnp.inf), row)
        return 0

    jax.lax.fori_loop(0, tiles, add_tile, 0)


def packed_score(
    parts, values, bitmap, count, last, *, span, unit, owner, reduce, config: Config | None = None, interpret=False
):
    """See ``pallas_kernels.packed_attention.packed_score``; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    rows, heads, segments, group, terms, dim = parts.shape
    blocks, lists = values.shape[2], rows * heads
    padded = max(pl.next_power_of_2(group), 16 // terms)  # at least 16 columns of the product
    if padded > group:
        parts = jnp.pad(parts, [(0, 0)] * 3 + [(0, padded - group), (0, 0), (0, 0)])
    operands = [
        parts.reshape(lists, segments, padded * terms, dim),
        values.reshape(lists, -1),
        bitmap.reshape(lists, blocks, -1),
    ]
    per_row = [count.reshape(rows, 1), last.reshape(rows, 1)] + ([] if owner is None else [owner])
    shape = (blocks,) if reduce is not None else (padded, blocks)
    score = triton_call(
        functools.partial(
            _score, tile=config.tile, tiles=config.tiles, span=span, unit=unit, group=group, reduce=reduce
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
