"""The store of a token as one Pallas Triton kernel, where XLA takes six launches: rotations and guarded writes.

One program per row of the batch: no other program reads the row's cursor, so it is written in place too. Query, key and value
are passed as one array. They are slices of one projection, and so XLA passes the projection without copying them apart.
"""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.quantised import check_codes
from pallas_kernels._triton.rotate import cosine_sine
from pallas_kernels.formats.mixing import signs
from pallas_kernels.formats.quantised import Quantised, codes_of, pack, scale_of
from pallas_kernels.host import copy_row, sinks_of
from pallas_kernels.numerics import product_precision

LEAST_MIXED = 32  # channels, whose halves are the least that a tensor core multiplies
MOST_ELEMENTS = 1 << 14  # elements of one row's query, held in registers


def _kernel(*refs, structure, group, rotating, sinks, interpret):
    # Operands:
    #   packed [B, H, P, D] with P = group + 2 (query heads, key, value)
    #   place, cursor [B]
    #   inv_freq [D/2] if rotating
    #   key, value and position of the cache, a tree of `structure`, since keys and values may be codes with scales
    # Results: the arrays of the cache, in the operands' memory; the moved cursor; the query.
    packed_ref, place_ref, cursor_ref, *refs = refs
    inv_freq_ref = refs.pop(0) if rotating else None
    count = structure.num_leaves
    key_ref, value_ref, position_ref = jax.tree.unflatten(structure, refs[count : 2 * count])
    moved_ref = refs[2 * count]
    query_ref = refs[-1] if rotating else None
    b = pl.program_id(0)
    place, at = place_ref[b], cursor_ref[b]
    half = packed_ref.shape[3] // 2
    halves = (pl.ds(0, half), pl.ds(half, half))

    def rotate(first, second):  # halves of rows [N, D/2] at the token's place
        if not rotating:
            return first, second
        cos, sin = cosine_sine(place.astype(jnp.float32) * inv_freq_ref[:][None, :])
        a, c = first.astype(jnp.float32), second.astype(jnp.float32)
        return (a * cos - c * sin).astype(first.dtype), (c * cos + a * sin).astype(second.dtype)

    if rotating:
        # All query heads as one block.
        row = _counted(packed_ref.shape[1] * group)
        head, member = row // group, row % group
        for part, x in zip(halves, rotate(*(packed_ref[b, head, member, part] for part in halves)), strict=True):
            query_ref[b, head, member, part] = x
    if not interpret:
        plt.debug_barrier()  # until all threads have read the cursor: a compiler moves that read down to the first use

    @pl.when(place >= 0)  # a full row moves its cursor too
    def _():
        moved_ref[b] = at + 1

    @pl.when((place >= 0) & (at < position_ref.shape[2]))
    def _():
        head = _counted(key_ref.shape[1])
        # Keys and values may have different numbers of copies, so each has a row of its own.
        key_row, value_row = (at if sinks is None else copy_row(at, sinks, ref.shape[2]) for ref in (key_ref, value_ref))
        key, value = ([packed_ref[b, head, group + i, part] for part in halves] for i in (0, 1))
        for ref, row, new in ((key_ref, key_row, rotate(*key)), (value_ref, value_row, value)):
            if isinstance(ref, Quantised):
                new, scales = _quantised(_mixed(*new) if ref.mixed else new, ref.kind, ref.grouped)
                for of, scale in enumerate(scales):  # all slots have their scales on the device
                    ref.scale[(b, head, at, *(of,) * ref.grouped)] = scale
                if ref.packed:
                    ref.codes[b, head, row, :] = pack(*new)
                    continue
                ref = ref.codes
            for part, x in zip(halves, new, strict=True):
                ref[b, head, row, part] = x
        position_ref[b, head, at] = jnp.full(head.shape, place, jnp.int32)


def _quantised(halves, kind, grouped):
    """Quantise rows that are given as halves [N, D/2]: codes in halves too, and the scales [N] of each group, one or four."""
    halves = [x.astype(jnp.float32) for x in halves]
    if not grouped:
        scale = scale_of(functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x), axis=1) for x in halves)), kind)
        return [codes_of(x, scale[:, None], kind) for x in halves], [scale.astype(jnp.bfloat16)]
    odd = ((jnp.arange(halves[0].shape[1], dtype=jnp.int32) & 1) == 1)[None, :]
    codes, scales = [], []
    for x in halves:
        most = (jnp.max(jnp.where(odd == which, jnp.abs(x), 0), axis=1) for which in (False, True))
        of_even, of_odd = (scale_of(each, kind) for each in most)
        codes.append(codes_of(x, jnp.where(odd, of_odd[:, None], of_even[:, None]), kind))
        scales += [of_even.astype(jnp.bfloat16), of_odd.astype(jnp.bfloat16)]
    return codes, scales


def _mixed(first, second):
    """Rotate rows that are given as halves [N, D/2], as `pallas_kernels.formats.mixing.mix` does but for the last bits."""
    half, dtype = first.shape[1], first.dtype
    precision = product_precision(dtype)
    low, high = (plt.dot(x, signs(half).astype(dtype), precision=precision) for x in (first, second))
    factor = 1 / math.sqrt(2 * half)
    return (low + high) * factor, (low - high) * factor


def _counted(count):
    """Count 0..count-1 in a block, whose size is a power of two: the last index is repeated, and its row written again."""
    return jnp.minimum(jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32), count - 1)


def store_token(
    key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq, rows=None, interpret=False
):
    """Store one token per row, and rotate its key and query; ``interpret=True`` runs anywhere, slowly."""
    batch = key.shape[0]
    rotating = query is not None
    # In the shapes of the projection's slices, [B, 1, H, P, D]: XLA then sees that neighbours are joined again, and copies
    # nothing.
    parts = [key[:, None, :, None], value[:, None, :, None]]
    packed = jnp.concatenate([query[:, None], *parts] if rotating else parts, axis=3)[:, 0]
    small = [packed, place, cursor, *([inv_freq] if rotating else [])]
    caches, structure = jax.tree.flatten((cache_key, cache_value, cache_position))
    operands = [*small, *caches]
    written = [*caches, cursor]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written]
    if rotating:
        shapes.append(jax.ShapeDtypeStruct(query.shape, query.dtype))
    group = query.shape[2] if rotating else 0
    out = triton_call(
        functools.partial(
            _kernel, structure=structure, group=group, rotating=rotating, sinks=sinks_of(rows), interpret=interpret
        ),
        grid=(batch,),
        out_shape=tuple(shapes),
        input_output_aliases={len(small) + i: i for i in range(len(caches))} | {2: len(caches)},
        name="store_token",
        num_warps=8,
        num_stages=1,
        interpret=interpret,
    )(*operands)
    key, value, position = jax.tree.unflatten(structure, out[: len(caches)])
    return key, value, position, out[len(caches)], out[-1] if rotating else None


def check(key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq, rows=None):
    """Raise ``NotImplementedError`` for head dims and queries that the kernel does not take."""
    heads, dim = key.shape[1:]
    if dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two")
    check_codes(cache_key, cache_value, packed=True)
    if dim < LEAST_MIXED and any(isinstance(x, Quantised) and x.mixed for x in (cache_key, cache_value)):
        raise NotImplementedError(f"got head_dim {dim}, expected at least {LEAST_MIXED} for mixed codes")
    if query is not None and heads * query.shape[2] * dim > MOST_ELEMENTS:
        raise NotImplementedError(f"got query {query.shape}, expected at most {MOST_ELEMENTS} elements per row")
