"""Decode attention over contiguous slots as one Pallas Triton kernel and a merge.

Grid (B, H, splits). The blocks below a row's limit are shared out evenly among the programs of a head, so the cost depends
on the tokens in the cache, not on its capacity. A program writes a float32 partial and its log-sum-exp (FlashDecoding's
split-K), and `merge_splits` joins them. The sums of a head's first program begin with the caller's partial softmax.

Keys may have another width than values. A width that is no power of two is read and multiplied in parts whose sizes are
powers of two: 80 channels as 64 and 16. Keys that are rotated are read as two halves.

Several queries of a row are rows of the same products, as if the group had so many more heads: a tensor core multiplies 16
rows, and one token's query heads are a few. So the cache is read once, and each query masks the tokens behind its position.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels._triton import online_softmax
from pallas_kernels._triton.assembly import kept
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes, check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.quantised import check_codes, rows_and_scale
from pallas_kernels._triton.rotate import rotated
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels._triton.split import LEAST, Config, blocks_to_read, partial_shapes, powers
from pallas_kernels.attend.dense_decode import code_kernel
from pallas_kernels.attend.dense_decode.queries import asked_positions, store_first, visible
from pallas_kernels.attend.merge_splits import pallas_triton as merge_kernel
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.numerics import product_precision

PROGRAMS = 264  # two per streaming multiprocessor of an H100 or H200; measured best of 1 to 8
MOST_ROWS = 64  # query heads times queries, where there are several queries: sums for more fill the registers
SHORT = 4096  # slots of a short list; at 1,160 the merge costs more than a second program per multiprocessor saves


def default_config(lists: int, slots: int, gaps: bool = False, codes: bool = False) -> Config:
    """Choose a config for B*H ``lists`` of ``slots``: all programs run at once, and in a full cache none is idle.

    With ``gaps`` there are twice as many programs: a head with little to read ends its programs at once. Where the lists
    alone fill the GPU and are short, one large program reads each list without a merge; `code_kernel` has no large programs.
    """
    programs = 2 * PROGRAMS if gaps else PROGRAMS
    if programs // lists == 2 and slots <= SHORT and not codes:
        return Config(block=128, num_warps=8)
    return Config(splits=max(1, min(programs // lists, pl.cdiv(slots, Config.block))))


def fitted(config: Config, query: jax.Array, dim: int, codes: bool = False) -> Config:
    """Shrink the config's blocks to fit the GPU's shared memory, for values of ``dim``.

    With ``codes`` the kernel of `code_kernel` runs: its blocks have fewer bytes, and it loads more of them ahead. Raise
    ``NotImplementedError`` if no block fits.
    """
    group, width = math.prod(query.shape[2:-1]), query.shape[-1]
    filled, size = pl.next_power_of_2(group), query.dtype.itemsize
    if codes:
        config = dataclasses.replace(config, num_stages=code_kernel.STAGES)

    def needed(block):
        if codes:
            return code_kernel.needed(group, width, dim, config.num_stages, block)
        # The pipeline's blocks of keys and values, and one that is laid out anew; the queries; the weights of a block.
        tiles = (config.num_stages - 1) * (width + dim) + max(width, dim)
        return size * (block * tiles + filled * width + filled * block)

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _kernel(*refs, structure, scale, block, interpret, early=None):
    # Operands, a tree of `structure`, since keys and values may be codes with scales:
    #   query [B, H, G, E], with several queries [B, H, G*T, E]
    #   key [B, H, S, E]
    #   value [B, H, S, D]
    #   position [B, H, S]
    #   limit [B]
    #   partials, out [B, H, G, D] and lse [B, H, G], or None; with several queries G*T, as the results
    #   gap [B, H, 2] or None
    #   query_position [B, T] or None
    #   inv_freq [E/2] and origin [B, 2], if keys are rotated
    # Results: out [B*H, N, G, D]; lse [B*H, N, G]; logits as in `store_first`, if they are wanted.
    refs, (out_ref, lse_ref, *logits_ref) = refs[: structure.num_leaves], refs[structure.num_leaves :]
    query_ref, key_ref, value_ref, position_ref, limit_ref, partials, gap_ref, asked_ref, *turned = jax.tree.unflatten(
        structure, refs
    )
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, group, width = query_ref.shape[1:]
    slots, splits, dim = key_ref.shape[2], out_ref.shape[1], out_ref.shape[3]
    # The group is filled up to a power of two by repeating its last head.
    repeated = jnp.minimum(jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32), group - 1)
    parts = [pl.ds(*part) for part in ([(0, width // 2), (width // 2, width // 2)] if turned else powers(width))]
    queries = [query_ref[b, h, repeated, part] for part in parts]
    dtype = queries[0].dtype
    precision = product_precision(dtype)
    asked = asked_positions(asked_ref, b, repeated)
    limit, blocks, block_number = blocks_to_read(limit_ref, gap_ref, (b, h), slots, block)

    def add(step, sums):
        step = block_number(step)
        # If the block size does not divide S, the last block starts early; slots that the block before had are hidden.
        start = jnp.minimum(step * block, slots - block)
        at = pl.ds(start, block)
        slot = start + jnp.arange(block, dtype=jnp.int32)
        position = position_ref[b, h, at]
        held = (position >= 0) & (slot >= step * block) & (slot < limit)
        keys, scales = zip(*(rows_and_scale(key_ref, (b, h, at, part), dtype) for part in parts), strict=True)
        if turned:
            inv_freq_ref, origin_ref = turned
            place = position - jnp.where(position < early, origin_ref[b, 0], origin_ref[b, 1])
            keys = rotated(*keys, place.astype(jnp.float32)[:, None] * inv_freq_ref[:][None, :])
        products = [plt.dot(x, k, trans_b=True, precision=precision) for x, k in zip(queries, keys, strict=True)]
        logits, key_scale = functools.reduce(jnp.add, products) * scale, scales[0]
        if key_scale is not None:
            logits = logits * key_scale.astype(jnp.float32)[None, :]
        # This removes the NaN of a hidden key. The NaN of a hidden value must go before it meets its weight of 0.
        logits = jnp.where(visible(held, position, asked), logits, -jnp.inf)
        store_first(logits_ref, (b, h), repeated, slot, logits, held, asked_ref)
        values, value_scale = rows_and_scale(value_ref, (b, h, at, slice(None)), dtype)
        values = kept(values, held, interpret)
        if value_scale is not None:
            value_scale = jnp.where(held, value_scale.astype(jnp.float32), 0)
        return online_softmax.add_block(sums, logits, values, precision, value_scale)

    sums = online_softmax.nothing(repeated.shape[0], dim)
    if partials is not None:
        out, lse = (ref[b, h, repeated] for ref in partials)
        sums = online_softmax.one_part(out, jnp.where(split == 0, lse, -jnp.inf))
    # Program `split` takes blocks first..last - 1 of the row.
    first, last = (jax.lax.div((split + i) * blocks, splits) for i in (0, 1))
    out, lse = online_softmax.result(jax.lax.fori_loop(first, last, add, sums))
    # Repeated query heads write equal values to the same address.
    out_ref[b * heads + h, split, repeated, :] = out.astype(out_ref.dtype)
    lse_ref[b * heads + h, split, repeated] = lse


def dense_decode(
    query, key, value, *, position, limit, scale, partials=None, gap=None, rotation=None, query_position=None, parts=False,
    mass=False, config: Config | None = None, interpret=False,
):  # fmt: skip
    """Attend with one or a few queries per head to all tokens below a limit; ``interpret=True`` runs anywhere, slowly."""
    (rows, heads, *members, width), dim = query.shape, value.shape[3]
    group, lists, slots = math.prod(members), rows * heads, key.shape[2]
    stored_heads = members[0] + (query_position is not None)  # of the logits of `store_first`
    codes = rotation is None and code_kernel.takes(query, key, value)
    if config is None:
        config = fitted(default_config(lists, slots, gap is not None, codes), query, dim, codes)
    if query_position is not None:
        query = query.reshape(rows, heads, group, width)
        partials = partials and (partials[0].reshape(rows, heads, group, dim), partials[1].reshape(rows, heads, group))
    if codes:
        body = functools.partial(code_kernel.kernel, kinds=(key.kind, value.kind))
        stored = (code_kernel.operands(key, value),)
    else:
        body, stored = _kernel, (key, value)
    if rotation is not None:
        body = functools.partial(body, early=rotation.first)
    turned = () if rotation is None else (rotation.inv_freq, rotation.origin)
    operands, structure = jax.tree.flatten((query, *stored, position, limit, partials, gap, query_position, *turned))
    whole = config.splits == 1 and not (parts or mass)  # then the kernel writes the result itself, and there is no merge
    out, lse, *logits = triton_call(
        functools.partial(
            body,
            structure=structure,
            scale=scale,
            block=min(config.block, 1 << (slots.bit_length() - 1)),
            interpret=interpret,
        ),
        grid=(rows, heads, config.splits),
        out_shape=(
            *partial_shapes(lists, config.splits, group, dim, query.dtype if whole else jnp.float32),
            *([jax.ShapeDtypeStruct((rows, heads, stored_heads, slots), jnp.float32)] if mass else []),
        ),
        name="dense_decode",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*operands)
    if parts:
        return out.reshape(rows, heads, -1, *members, dim), lse.reshape(rows, heads, -1, *members)
    more = []
    if not whole:
        received = (*logits, position, limit) if mass else None
        out, lse, *more = merge_kernel.merge_splits(
            out, lse, dtype=query.dtype, received=received, queries=math.prod(members[1:]), interpret=interpret
        )
    return out.reshape(rows, heads, *members, dim), lse.reshape(rows, heads, *members), *more


def check(query, key, value, *, rotation=None, query_position=None, **_):
    """Raise ``NotImplementedError`` for dtypes, widths, groups and caches that the kernel does not take."""
    if query_position is not None and math.prod(query.shape[2:4]) > MOST_ROWS:
        heads, queries = query.shape[2:4]
        raise NotImplementedError(f"got {queries} queries of {heads} query heads, expected at most {MOST_ROWS} in all")
    check_dtypes(query, key, value)
    width, (slots, dim) = key.shape[3], value.shape[2:]
    check_head_dim(dim)
    if width % LEAST or not 0 < width <= 256:
        raise NotImplementedError(f"got keys of {width} numbers, expected a multiple of {LEAST} up to 256")
    if rotation is not None and (width & (width - 1) or width < 2 * LEAST):
        raise NotImplementedError(f"got rotated keys of {width} numbers, expected a power of two of at least {2 * LEAST}")
    if slots < LEAST:
        raise NotImplementedError(f"got {slots} slots, expected at least {LEAST}")
    check_codes(key, value, packed=True)
    if rotation is not None and isinstance(key, Quantised) and key.mixed:
        raise NotImplementedError(f"got {key.name} codes of keys to rotate, expected codes that are not mixed")
    fitted(Config(), query, dim, rotation is None and code_kernel.takes(query, key, value))
