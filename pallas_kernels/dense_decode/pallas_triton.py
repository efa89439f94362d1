"""Decode attention over contiguous slots as one Pallas Triton kernel and a merge.

Grid (B, H, splits). The blocks below a row's limit are shared out evenly among the programs of a head, so the cost goes by
the tokens in the cache, not by its capacity. A program writes a float32 partial and its log-sum-exp (FlashDecoding's
split-K), and `merge_splits` joins them.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._triton import online_softmax
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.quantised import check_codes, rows_and_scale
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels._triton.split import LEAST, Config
from pallas_kernels.merge_splits import pallas_triton as merge_kernel
from pallas_kernels.numerics import product_precision

PROGRAMS = 264  # two per streaming multiprocessor of an H100 or H200; measured best of 1 to 8


def default_config(lists: int, slots: int) -> Config:
    """Config for B*H ``lists`` of ``slots``: all programs run at once, and in a full cache none is idle."""
    return Config(splits=max(1, min(PROGRAMS // lists, pl.cdiv(slots, Config.block))))


def fitted(config: Config, query: jax.Array) -> Config:
    """The config with blocks that fit the GPU's shared memory; ``NotImplementedError`` if none do."""
    group, dim = query.shape[-2:]
    filled, size = pl.next_power_of_2(group), query.dtype.itemsize

    def needed(block):
        # The pipeline's blocks of keys and values, and one that is laid out anew; the queries; the weights of a block.
        tiles = 2 * (config.num_stages - 1) + 1
        return size * (tiles * block * dim + filled * dim + filled * block)

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _kernel(*refs, structure, scale, block):
    # query [B, H, G, D]; key, value [B, H, S, D]; position [B, H, S]; limit [B], in a tree of `structure`, since keys and
    # values may be codes with scales; then out [B*H, N, G, D]; lse [B*H, N, G]
    *refs, out_ref, lse_ref = refs
    query_ref, key_ref, value_ref, position_ref, limit_ref = jax.tree.unflatten(structure, refs)
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, group, dim = query_ref.shape[1:]
    slots, splits = key_ref.shape[2], out_ref.shape[1]
    # The group is filled up to a power of two by repeating its last head.
    repeated = jnp.minimum(jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32), group - 1)
    query = query_ref[b, h, repeated, :]
    precision = product_precision(query.dtype)
    limit = jnp.clip(limit_ref[b], 0, slots)
    blocks = jax.lax.div(limit + (block - 1), block)

    def add(step, sums):
        # If the block size does not divide S, the last block starts early; slots that the block before had are hidden.
        start = jnp.minimum(step * block, slots - block)
        at = pl.ds(start, block)
        slot = start + jnp.arange(block, dtype=jnp.int32)
        held = (position_ref[b, h, at] >= 0) & (slot >= step * block) & (slot < limit)
        keys, key_scale = rows_and_scale(key_ref, (b, h, at, slice(None)), query.dtype)
        logits = plt.dot(query, keys, trans_b=True, precision=precision) * scale
        if key_scale is not None:
            logits = logits * key_scale.astype(jnp.float32)[None, :]
        # This removes the NaN of a hidden key. The NaN of a hidden value must go before it meets its weight of 0.
        logits = jnp.where(held[None, :], logits, -jnp.inf)
        values, value_scale = rows_and_scale(value_ref, (b, h, at, slice(None)), query.dtype)
        values = jnp.where(held[:, None], values, 0)
        if value_scale is not None:
            value_scale = jnp.where(held, value_scale.astype(jnp.float32), 0)
        return online_softmax.add_block(sums, logits, values, precision, value_scale)

    # Program `split` takes blocks first..last - 1 of the row.
    first, last = (jax.lax.div((split + i) * blocks, splits) for i in (0, 1))
    out, lse = online_softmax.result(jax.lax.fori_loop(first, last, add, online_softmax.nothing(query.shape[0], dim)))
    # Repeated query heads write the same numbers to the same address.
    out_ref[b * heads + h, split, repeated, :] = out.astype(out_ref.dtype)
    lse_ref[b * heads + h, split, repeated] = lse


def dense_decode(query, key, value, *, position, limit, scale, config: Config | None = None, interpret=False):
    """See ``pallas_kernels.dense_decode.dense_decode``; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, group, dim = query.shape
    lists, slots = rows * heads, key.shape[2]
    config = fitted(default_config(lists, slots), query) if config is None else config
    operands, structure = jax.tree.flatten((query, key, value, position, limit))
    whole = config.splits == 1  # then the kernel writes the result itself, and there is no merge
    out, lse = triton_call(
        functools.partial(
            _kernel, structure=structure, scale=scale, block=min(config.block, 1 << (slots.bit_length() - 1))
        ),
        grid=(rows, heads, config.splits),
        out_shape=(
            jax.ShapeDtypeStruct((lists, config.splits, group, dim), query.dtype if whole else jnp.float32),
            jax.ShapeDtypeStruct((lists, config.splits, group), jnp.float32),
        ),
        name="dense_decode",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*operands)
    if not whole:
        out, lse = merge_kernel.merge_splits(out, lse, dtype=query.dtype, interpret=interpret)
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def check(query, key, value, *, position, limit, scale):
    """Raise ``NotImplementedError`` for dtypes, head dims, groups and caches the kernel does not take."""
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if dtypes not in ({"bfloat16"}, {"float16"}, {"float32"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected one of bfloat16, float16, float32 for all")
    dim, slots = query.shape[-1], key.shape[2]
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
    if slots < LEAST:
        raise NotImplementedError(f"got {slots} slots, expected at least {LEAST}")
    check_codes(key, value)
    fitted(Config(), query)
