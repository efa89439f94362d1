"""Attention probabilities of a window of queries, as two Pallas Triton kernels; both read every key once and write no logits.

All G * W queries of a KV head are the rows of one tile. In the first kernel, grid (B*H, splits), a program writes the maximum
and the sum of each row over its share of the slots. In the second kernel, grid (B*H, blocks), a program joins the shares and
adds up the probabilities of its block of slots.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes, check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels.numerics import finite_or_zero, product_precision
from pallas_kernels.score.window_score.reference import of_all

PROGRAMS = 264  # two per streaming multiprocessor of an H100 or H200
MOST_QUERIES = 512  # rows of the tile


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: slots per step, a power of two of at least 16.
        splits: programs per (row, KV head) of the first kernel, a power of two.
        num_warps: warps per program.
        num_stages: depth of Triton's software pipeline in the first kernel.
    """

    block: int = 64
    splits: int = 32
    num_warps: int = 8
    num_stages: int = 2


def default_config(lists: int, slots: int) -> Config:
    """Choose a config for B*H ``lists`` of S ``slots``: enough splits to fill the GPU, and a block or more for each."""
    splits = pl.next_power_of_2(max(1, min(pl.cdiv(PROGRAMS, lists), slots // Config.block)))
    return Config(splits=splits)


def fitted(config: Config, query: jax.Array) -> Config:
    """Shrink the config's blocks to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    group, window, dim = query.shape[2:]

    def needed(block):
        # All queries, the pipeline's blocks of keys, and one that is laid out anew.
        return query.dtype.itemsize * dim * (_tile(group, window) + config.num_stages * block)

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _tile(group: int, window: int) -> int:
    """Count the rows of the tile that has all queries of a KV head."""
    return pl.next_power_of_2(max(group, 4)) * pl.next_power_of_2(max(window, 4))


def _logits(first, query, asked, key_ref, position_ref, *, scale, block):
    """Compute logits [M, block] of slots from ``first`` on, -inf where hidden; return them, the slots, and which exist."""
    slot = first + jnp.arange(block, dtype=jnp.int32)
    real = slot < key_ref.shape[0]
    at = jnp.minimum(slot, key_ref.shape[0] - 1)
    position = jnp.where(real, position_ref[at], -1)
    # The key of an empty slot may be NaN; both kernels must see the same logits, so both call this function.
    key = jnp.where((position >= 0)[:, None], key_ref[at, :], 0)
    logits = plt.dot(query, key, trans_b=True, precision=product_precision(query.dtype)) * scale
    seen = (position >= 0)[None, :] & (position[None, :] <= asked[:, None])
    return jnp.where(seen, logits, -jnp.inf), slot, real


def _totals_kernel(query_ref, asked_ref, key_ref, position_ref, maximum_ref, total_ref, *, steps, block, scale):
    # Of one list: query [M, D]; asked [M], positions of the queries; key [S, D]; position [S]. Of this split: maximum and
    # total [M].
    query, asked = query_ref[...], asked_ref[...]
    first = pl.program_id(1) * steps  # this program's first block of slots

    def add_block(step, carry):
        total, maximum = carry
        logits, _, _ = _logits((first + step) * block, query, asked, key_ref, position_ref, scale=scale, block=block)
        risen = jnp.maximum(maximum, jnp.max(logits, axis=1))
        shift = finite_or_zero(risen)
        return total * jnp.exp(maximum - shift) + jnp.sum(jnp.exp(logits - shift[:, None]), axis=1), risen

    carry = jnp.zeros_like(asked, jnp.float32), jnp.full_like(asked, -jnp.inf, jnp.float32)
    total_ref[...], maximum_ref[...] = jax.lax.fori_loop(0, steps, add_block, carry)


def _votes_kernel(
    query_ref,  # [M, D]
    asked_ref,  # [M]
    maximum_ref,  # [splits, M]
    total_ref,  # [splits, M]
    key_ref,  # [S, D]
    position_ref,  # [S]
    out_ref,  # [G, S]
    *,
    group,
    block,
    scale,
):
    # The refs are one list's. Rows of the tile belong to `group` heads; the last heads may be padding.
    query, asked = query_ref[...], asked_ref[...]
    # Join the splits: the denominator of each row, relative to its greatest maximum.
    maximum = maximum_ref[...]
    shift = finite_or_zero(jnp.max(maximum, axis=0))
    total = jnp.sum(total_ref[...] * jnp.exp(maximum - shift[None, :]), axis=0)
    share = 1 / jnp.where(total > 0, total, 1)
    logits, slot, real = _logits(pl.program_id(1) * block, query, asked, key_ref, position_ref, scale=scale, block=block)
    chance = jnp.exp(logits - shift[:, None]) * share[:, None]
    # Add up the rows of each head, which are the queries of its window.
    head = jnp.arange(query.shape[0], dtype=jnp.int32) // (query.shape[0] // group)
    for at in range(out_ref.shape[0]):
        votes = jnp.sum(jnp.where((head == at)[:, None], chance, 0), axis=0)
        plt.store(out_ref.at[jnp.full_like(slot, at), slot], votes, mask=real)


def window_score(
    query, key, *, query_position, key_position, scale, axis=None, config: Config | None = None, interpret: bool = False
):
    """Sum the attention probability of each slot over the window of queries; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, group, window, dim = query.shape
    lists, num_slots = rows * heads, key.shape[2]
    config = fitted(default_config(lists, num_slots), query) if config is None else config
    wide, tall = pl.next_power_of_2(max(window, 4)), pl.next_power_of_2(max(group, 4))
    tile = tall * wide
    # The group and the window are padded to powers of two; rows of padding have position -1 and see no slot.
    short = (0, tall - group), (0, wide - window)
    query = jnp.pad(query, ((0, 0), (0, 0), *short, (0, 0))).reshape(lists, tile, dim)
    asked = jnp.broadcast_to(query_position[:, None, None], (rows, heads, group, window))
    asked = jnp.pad(asked, ((0, 0), (0, 0), *short), constant_values=-1).reshape(lists, tile)
    key, key_position = key.reshape(lists, num_slots, dim), key_position.reshape(lists, num_slots)

    def whole(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda i, j, n=x.ndim: (i,) + (0,) * (n - 1))

    def call(kernel, grid, operands, out_specs, out_shape, name, stages):
        return triton_call(
            functools.partial(kernel, block=config.block, scale=scale),
            grid=grid,
            in_specs=[whole(x) for x in operands],
            out_specs=out_specs,
            out_shape=out_shape,
            num_warps=config.num_warps,
            num_stages=stages,
            interpret=interpret,
            name=name,
        )(*operands)

    partial = jax.ShapeDtypeStruct((lists, config.splits, tile), jnp.float32)
    steps = pl.cdiv(num_slots, config.splits * config.block)
    maximum, total = call(
        functools.partial(_totals_kernel, steps=steps),
        (lists, config.splits),
        [query, asked, key, key_position],
        [pl.BlockSpec((None, None, tile), lambda i, j: (i, j, 0))] * 2,
        [partial] * 2,
        "window_score_totals",
        config.num_stages,
    )
    if axis is not None:  # one split, which has the slots of all devices
        most = jnp.max(maximum, axis=1, keepdims=True)
        total = jnp.sum(total * jnp.exp(maximum - finite_or_zero(most)), axis=1, keepdims=True)
        total, maximum = of_all(total, most, axis)
    votes = call(
        functools.partial(_votes_kernel, group=tall),
        (lists, pl.cdiv(num_slots, config.block)),
        [query, asked, maximum, total, key, key_position],
        pl.BlockSpec((None, group, num_slots), lambda i, j: (i, 0, 0)),
        jax.ShapeDtypeStruct((lists, group, num_slots), jnp.float32),
        "window_score_votes",
        1,
    )
    return votes.reshape(rows, heads, group, num_slots)


def check(query, key, *, query_position, key_position, scale, axis):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernels do not take."""
    check_dtypes(query)
    group, window, dim = query.shape[2:]
    check_head_dim(dim)
    if _tile(group, window) > MOST_QUERIES:
        raise NotImplementedError(f"got {group} heads of {window} queries, expected at most {MOST_QUERIES} together")
    fitted(Config(), query)
