"""Values of tokens by partial keys as two Pallas Triton kernels, grid (B, H, splits) each.

1. ``partial_score``: a program has a stretch of the slots. It reads their keys once, and writes logits, scores, the largest
   logit of each query head and the number of tokens.
2. ``partial_near``: a program compares the logits of a stretch with the largest of all stretches. It reads those of query
   heads that come near it in this stretch. Programs add up what they count, and whole numbers have one sum in any order.

Keys have a few channels, and their number need not be a power of two: a block has more columns, which are 0.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.shared_memory import check_fits
from pallas_kernels.numerics import product_precision

MOST_CHANNELS = 256
LOWEST = -3.4028234663852886e38  # the most negative finite float32


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided; the sizes of blocks are powers of two.

    Attributes:
        block: slots per step of the first kernel, at least 16.
        programs: of the first kernel over all heads of all rows, approximately.
        near_block: slots per step of the second kernel.
        num_warps: warps per program.
    """

    block: int = 128
    programs: int = 1056  # eight per streaming multiprocessor of an H100 or H200: rows of few bytes are not loaded ahead
    near_block: int = 1024
    num_warps: int = 4


def _columns(channels: int) -> int:
    """Columns of a block for so many channels."""
    return max(pl.next_power_of_2(channels), 16)


def _score(*refs, scale, block, steps):
    # query [B, H, G, C]; key [B, H, S, C]; position [B, H, S]; cursor [B]; logits [B, H, G, S]; score [B, H, S]; most
    # [B, H, N, G]; count [B, H, N]; near [B], zeros for the next kernel
    query_ref, key_ref, position_ref, cursor_ref, logits_ref, score_ref, most_ref, count_ref, near_ref = refs
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (group, channels), slots = query_ref.shape[2:], key_ref.shape[2]
    # The group is filled up to a power of two by repeating its last head, whose numbers are written again.
    row = jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)
    head, real = jnp.minimum(row, group - 1), (row < group)[:, None]
    newest, channel = cursor_ref[b] - 1, jnp.arange(_columns(channels), dtype=jnp.int32)

    def rows(ref, index, inside):
        at, column = (jnp.broadcast_to(x, (len(index), len(channel))) for x in (index[:, None], channel[None]))
        wanted = jnp.broadcast_to(inside[:, None], at.shape) & (column < channels)
        return plt.load(ref.at[b, h, at, column], mask=wanted, other=0.0)

    query = rows(query_ref, head, head >= 0)

    def add(step, found):
        most, count = found
        slot = (split * steps + step) * block + jnp.arange(block, dtype=jnp.int32)
        held = plt.load(position_ref.at[b, h, slot], mask=slot < slots, other=-1) >= 0
        others = held & (slot != newest)
        key = rows(key_ref, slot, slot < slots)
        product = plt.dot(query, key, trans_b=True, precision=product_precision(query.dtype)) * scale
        score = jnp.maximum(jnp.sum(jnp.where(real, product, 0.0), axis=0) / group, LOWEST)
        score = jnp.where(others, score, jnp.where(held, jnp.inf, -jnp.inf))
        plt.store(score_ref.at[b, h, slot], score, mask=slot < slots)
        logits = jnp.where(others[None], product, -jnp.inf)
        line, column = (jnp.broadcast_to(x, logits.shape) for x in (head[:, None], slot[None]))
        plt.store(logits_ref.at[b, h, line, column], logits, mask=column < slots)
        return jnp.maximum(most, jnp.max(logits, axis=1)), count + jnp.sum(others.astype(jnp.int32), dtype=jnp.int32)

    nothing = jnp.full(head.shape, -jnp.inf, jnp.float32), jnp.int32(0)
    near_ref[b] = jnp.int32(0)  # every program of the row writes it
    last = jnp.minimum(pl.cdiv(slots, block) - split * steps, steps)
    most_ref[b, h, split, head], count_ref[b, h, split] = lax.fori_loop(0, last, add, nothing)


def _near(logits_ref, most_ref, count_ref, alpha_ref, _, near_ref, stored_ref, *, block, steps):
    # logits [B, H, G, S]; most [B, H, N, G]; count [B, H, N]; alpha [1]; near [B], before and after, in the same memory;
    # stored [B, H]
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (group, slots), parts = logits_ref.shape[2:], most_ref.shape[2]
    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)
    most = [plt.load(most_ref.at[b, h, part, head], mask=part < parts, other=-jnp.inf) for head in range(group)]
    edges = [jnp.max(x) - alpha_ref[0] for x in most]

    def add(step, near):
        slot = (split * steps + step) * block + jnp.arange(block, dtype=jnp.int32)
        for head, edge in enumerate(edges):
            wanted = (slot < slots) & (most_ref[b, h, split, head] >= edge)
            logits = plt.load(logits_ref.at[b, h, head, slot], mask=wanted, other=-jnp.inf)
            near += ((logits >= edge) & (logits > -jnp.inf)).astype(jnp.int32)
        return near

    near = lax.fori_loop(0, steps, add, jnp.zeros((block,), jnp.int32))
    jax.ref.addupdate(near_ref, (b,), jnp.sum(near, dtype=jnp.int32))

    @pl.when(split == 0)
    def _():
        stored_ref[b, h] = jnp.sum(plt.load(count_ref.at[b, h, part], mask=part < parts, other=0), dtype=jnp.int32)


def partial_score(query, key, position, cursor, alpha, *, scale, config: Config | None = None, interpret=False):
    """See ``pallas_kernels.partial_score.partial_score``; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    (batch, heads, group, _), slots = query.shape, key.shape[2]
    blocks = pl.cdiv(slots, config.block)
    steps = pl.next_power_of_2(pl.cdiv(blocks, max(1, min(config.programs // (batch * heads), blocks))))
    splits, stretch = pl.cdiv(blocks, steps), steps * config.block
    call = functools.partial(
        triton_call, grid=(batch, heads, splits), num_warps=config.num_warps, num_stages=1, interpret=interpret
    )

    def whole(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((batch, *shape), dtype)

    floats = (heads, group, slots), (heads, slots), (heads, splits, group)
    logits, score, most, count, near = call(
        functools.partial(_score, scale=scale, block=config.block, steps=steps),
        out_shape=[*(whole(*shape, dtype=jnp.float32) for shape in floats), whole(heads, splits), whole()],
        name="partial_score",
    )(query, key, position, cursor)
    near_block = min(config.near_block, stretch)
    near, stored = call(
        functools.partial(_near, block=near_block, steps=stretch // near_block),
        out_shape=[whole(), whole(heads)],
        input_output_aliases={4: 0},
        name="partial_near",
    )(logits, most, count, alpha.reshape(1), near)
    return score, near, stored


def check(query, key, position, cursor, alpha, *, scale):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernels do not take."""
    if str(query.dtype) not in ("bfloat16", "float16", "float32"):
        raise NotImplementedError(f"got dtype {query.dtype}, expected bfloat16, float16 or float32")
    (group, channels), slots = query.shape[2:], key.shape[2]
    if not 0 < channels <= MOST_CHANNELS or not slots:
        raise NotImplementedError(f"got {slots} keys of {channels} channels, expected 1 to {MOST_CHANNELS} channels")
    rows = Config.block + pl.next_power_of_2(group)
    check_fits(query.dtype.itemsize * _columns(channels) * rows + 4 * pl.next_power_of_2(group) * Config.block)
