"""Attention over listed blocks and columns as one Pallas Triton kernel.

Grid (N, B*H*G): a program has one block of queries of one head, and its running softmax in registers. It reads its own block,
then the listed blocks as slices of the cache, then the columns row by row. The last blocks of queries, which have the longest
lists, begin first. Only its own block can hold tokens that are not real: everything else is read without a mask.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes, check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import LEAST_BLOCK, fitting_block
from pallas_kernels.numerics import LOG2_E, product_precision


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        tile: keys read per step, a power of two of at least 16, at most the size of a block.
        num_warps: warps per program; None takes `default_warps`.
        num_stages: depth of Triton's software pipeline.
    """

    tile: int = 64
    num_warps: int | None = None
    num_stages: int = 3


def fitted(config: Config, query: jax.Array, block: int) -> Config:
    """Shrink the config's tile to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    size, dim = query.dtype.itemsize, query.shape[-1]

    def needed(tile):
        # The queries; keys and values of each step that is on its way; the weights, which are an operand too.
        return size * (block * dim + 2 * config.num_stages * tile * dim + block * tile)

    return dataclasses.replace(config, tile=fitting_block(min(config.tile, block), needed))


def default_warps(query: jax.Array, block: int) -> int:
    """Choose a warp for each 16 queries of a block, at least 4; wide rows, which need more registers, get twice as many."""
    wide = query.shape[-1] * query.dtype.itemsize > 256
    return max(4, block // 16) * (2 if wide else 1)


def _kernel(
    query_ref,  # [B*H*G, T, D]
    key_ref,  # [B*H, S, D]
    value_ref,  # [B*H, S, D]
    distances_ref,  # [B*H*G, L]
    first_ref,  # [B*H*G, N]
    count_ref,  # [B*H*G, N]
    columns_ref,  # [B*H*G, C]
    before_ref,  # [B*H*G, N], the number of columns before each block
    covered_ref,  # [B*H*G, P], whether a distance is listed
    start_ref,  # [1], in blocks
    total_ref,  # [B], real tokens in the cache
    out_ref,  # [B*H*G, T, D]
    lse_ref,  # [B*H*G, T]
    *,
    block,
    tile,
    scale,
    heads,
    group,
):
    at, number = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1)
    store, tokens, dim = number // group, query_ref.shape[1], query_ref.shape[2]
    own, total = start_ref[0] + at, total_ref[number // (heads * group)]
    precision, factor = product_precision(query_ref.dtype), scale * LOG2_E
    token = at * block + jnp.arange(block, dtype=jnp.int32)
    row = jnp.minimum(token, tokens - 1)
    asked = own * block + jnp.arange(block, dtype=jnp.int32)
    # The last block may have fewer tokens. The queries of tokens that are not real may hold anything.
    query = jnp.where((asked < total)[:, None], query_ref[number, row, :], 0)
    ones = jnp.arange(tile, dtype=jnp.int32)

    def add(carry, keys, values, seen=None):
        """Add one more tile to the running softmax, which is in powers of 2."""
        sums, maximum, out = carry
        logits = plt.dot(query, keys, trans_b=True, precision=precision) * factor
        if seen is not None:
            logits = jnp.where(seen, logits, -jnp.inf)
        risen = jnp.maximum(maximum, jnp.max(logits, axis=1))
        decay, weight = jnp.exp2(maximum - risen), jnp.exp2(logits - risen[:, None])
        added = plt.dot(weight.astype(values.dtype), values, precision=precision)
        return sums * decay + jnp.sum(weight, axis=1), risen, out * decay[:, None] + added

    def add_own(step, carry):
        slot = own * block + step * tile + ones
        real = slot < total
        there = jnp.where(real, slot, 0)
        keys, values = (jnp.where(real[:, None], ref[store, there, :], 0) for ref in (key_ref, value_ref))
        return add(carry, keys, values, real[None] & (slot[None] <= asked[:, None]))

    def add_listed(step, carry):
        entry, part = jax.lax.div(step, block // tile), jax.lax.rem(step, block // tile)
        back = distances_ref[number, first_ref[number, at] + entry]
        there = pl.ds((own - back) * block + part * tile, tile)
        return add(carry, key_ref[store, there, :], value_ref[store, there, :])

    def add_columns(step, carry):
        entry = step * tile + ones
        real = entry < before_ref[number, at]
        slot = jnp.where(real, columns_ref[number, jnp.minimum(entry, columns_ref.shape[1] - 1)], 0)
        seen = real & ~covered_ref[number, own - jax.lax.div(slot, block)]
        return add(carry, key_ref[store, slot, :], value_ref[store, slot, :], seen[None])

    # The first tile has the block's first token, which all of its queries see: the maximum is finite from there on. A block
    # without a real token reads nothing.
    some = own * block < total
    carry = (jnp.zeros((block,), jnp.float32), jnp.full((block,), -1e30, jnp.float32), jnp.zeros((block, dim), jnp.float32))
    carry = jax.lax.fori_loop(0, jnp.where(some, jnp.int32(block // tile), 0), add_own, carry)
    listed = jnp.where(some, count_ref[number, at] * (block // tile), 0)
    carry = jax.lax.fori_loop(0, listed, add_listed, carry)
    steps = jnp.where(some, pl.cdiv(before_ref[number, at], tile), 0)
    sums, maximum, out = jax.lax.fori_loop(0, steps, add_columns, carry)
    out = jnp.where((asked < total)[:, None], out / jnp.where(sums > 0, sums, 1)[:, None], 0)
    lse = jnp.where(asked < total, maximum / LOG2_E + jnp.log(sums), -jnp.inf)
    plt.store(lse_ref.at[jnp.full_like(token, number), token], lse, mask=token < tokens)
    channel = jnp.broadcast_to(jnp.arange(dim, dtype=jnp.int32)[None], out.shape)
    place = jnp.broadcast_to(token[:, None], out.shape)
    mask = jnp.broadcast_to((token < tokens)[:, None], out.shape)
    plt.store(out_ref.at[jnp.full_like(place, number), place, channel], out.astype(out_ref.dtype), mask=mask)


def sparse_attention(
    query, key, value, *, distances, first, count, columns, num_columns, start, length, block, scale,
    config: Config | None = None, interpret: bool = False,
):  # fmt: skip
    """Attend causally to the listed blocks and columns; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, tokens, dim = query.shape
    config = fitted(Config(), query, block) if config is None else config
    lists, slots, blocks = batch * heads * group, key.shape[2], first.shape[3]
    start = jnp.asarray(start, jnp.int32)
    distances, first, count, columns = (x.reshape(lists, -1) for x in (distances, first, count, columns))
    # Count the columns before each block of queries, and mark the listed distances: columns there have been read already.
    entry = jnp.arange(columns.shape[1], dtype=jnp.int32)
    ordered = jnp.where(entry[None] < num_columns.reshape(lists, 1), columns, slots)
    edge = start + block * jnp.arange(blocks, dtype=jnp.int32)
    before = jax.vmap(lambda x: jnp.searchsorted(x, edge))(ordered).astype(jnp.int32)
    # A head with columns has one list, of no more distances than the cache has blocks.
    alone = distances[:, : pl.cdiv(slots, block)]
    entry = jnp.arange(alone.shape[1], dtype=jnp.int32)
    back = jnp.where(entry[None] < count.max(axis=1, keepdims=True), alone, pl.cdiv(slots, block))
    number = jnp.arange(lists, dtype=jnp.int32)[:, None]
    covered = jnp.zeros((lists, pl.cdiv(slots, block)), bool).at[number, back].set(True, mode="drop")
    out, lse = triton_call(
        functools.partial(_kernel, block=block, tile=config.tile, scale=scale, heads=heads, group=group),
        grid=(blocks, lists),
        out_shape=(
            jax.ShapeDtypeStruct((lists, tokens, dim), query.dtype),
            jax.ShapeDtypeStruct((lists, tokens), jnp.float32),
        ),
        name="sparse_attention",
        num_warps=config.num_warps or default_warps(query, block),
        num_stages=config.num_stages,
        interpret=interpret,
    )(
        query.reshape(lists, tokens, dim), *(x.reshape(batch * heads, slots, dim) for x in (key, value)), distances, first,
        count, columns, before, covered, (start // block).reshape(1), (start + length).astype(jnp.int32),
    )  # fmt: skip
    return out.reshape(query.shape), lse.reshape(query.shape[:4])


def check(query, key, value, *, block, **_):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernel does not take."""
    check_dtypes(query)
    dim = query.shape[-1]
    check_head_dim(dim)
    if block < LEAST_BLOCK or block > 128 or block & (block - 1):
        raise NotImplementedError(f"got blocks of {block} tokens, expected a power of two from {LEAST_BLOCK} to 128")
    fitted(Config(), query, block)
