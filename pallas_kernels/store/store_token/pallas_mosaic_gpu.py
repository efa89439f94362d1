"""The store of a token through Mosaic GPU: a cluster of programs for each row of the batch, which write the cache in place.

No other cluster reads the cursor, so it is written in place too, after all of the cluster have read it. Query, key and value
are passed as one array, as in the kernel for Triton.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels._triton.quantised import refuse_codes
from pallas_kernels.host import copy_row, sinks_of

MOST = 2**15  # elements of a row's queries, keys and values, in registers
TAKES = f"{arrays.HOPPER}, D a power of two up to {2 * THREADS}, H * (G + 2) * D up to {MOST}, no codes"


def _body(packed_ref, place_ref, *refs, shape, slots, rotating, sinks):
    # packed [B, H, P, D] with query heads, key and value; place [B]; inv_freq [D / 2] if rotating; then in place: keys and
    # values [B, H, S, D] (or copies of rows), position [B, H, S], cursor [B]; and the query [B, H, G, D] if rotating.
    inv_freq_ref, refs = refs[:rotating], refs[rotating:]
    key_ref, value_ref, position_ref, cursor_ref, *query_ref = refs
    b, (heads, group, dim), parts = lax.axis_index("x"), shape, parts_for(shape[0])
    few, part = heads // parts, lax.axis_index("part") if parts > 1 else jnp.int32(0)
    place, at = arrays.scalar(place_ref, b), arrays.scalar(cursor_ref, b)
    arrays.arrive(parts)
    fits = (place >= 0) & (at < slots)
    key_row, value_row = (at if sinks is None else copy_row(at, sinks, ref.shape[2]) for ref in (key_ref, value_ref))

    def taken(lines, width):  # heads, one of `lines` vectors of each, and a channel, for `width` channels of each vector
        entry = arrays.counted(arrays.size_of(few * lines * width))
        vector, inside = lax.div(entry, width), entry < few * lines * width
        return part * few + lax.div(vector, lines), lax.rem(vector, lines), lax.rem(entry, width), inside

    def load(head, member, channel, inside):
        line = jnp.minimum((b * heads + head) * (group + 2) + member, packed_ref.shape[0] * heads * (group + 2) - 1)
        return arrays.load(packed_ref, jnp.where(inside, line * dim + channel, -1))

    def write(ref, head, row, channel, where, x):
        line = (b * heads + head) * ref.shape[2] + row
        arrays.store(ref, jnp.where(where, channel, -1), x, (line, dim))

    if rotating:
        half = dim // 2
        head, member, channel, inside = taken(group + 1, half)
        first, second = (load(head, member, channel + i, inside) for i in (0, half))
        thread = arrays.counted(THREADS)
        angle = place.astype(jnp.float32) * arrays.load(inv_freq_ref[0], lax.rem(thread, half))
        cos, sin = (arrays.repeated(x, head.shape[0] // THREADS) for x in arrays.cosine_sine(angle))
        for x, start in ((first * cos - second * sin, 0), (second * cos + first * sin, half)):
            where = jnp.where(inside & (member < group), ((b * heads + head) * group + member) * dim + channel + start, -1)
            arrays.store(query_ref[0], where, x)
            write(key_ref, head, key_row, channel + start, inside & (member == group) & fits, x)
    rest = [(value_ref, group + 1, value_row)] + ([] if rotating else [(key_ref, group, key_row)])
    head, _, channel, inside = taken(1, dim)
    for ref, member, row in rest:
        write(ref, head, row, channel, inside & fits, load(head, member, channel, inside))
    head = arrays.counted(arrays.size_of(few))
    where = jnp.where((head < few) & fits, (b * heads + part * few + head) * slots + at, -1)
    arrays.store(position_ref, where, arrays.spread(place, head.shape[0]))
    arrays.wait(parts)  # all threads have read the cursor
    arrays.put(cursor_ref, jnp.where((place >= 0) & (part < 1), b, -1), at + 1)  # a full row moves its cursor too


def parts_for(heads: int) -> int:
    """Choose the programs of a row's cluster, which share its heads out."""
    return next(n for n in (8, 4, 2, 1) if heads % n == 0)


def store_token(key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq, rows=None):
    """Store one token per row, and rotate its key and query."""
    (batch, heads, dim), rotating = key.shape, query is not None
    parts = [key[:, None, :, None], value[:, None, :, None]]
    packed = jnp.concatenate([query[:, None], *parts] if rotating else parts, axis=3)[:, 0]
    shape = heads, query.shape[2] if rotating else 0, dim
    states, out = (cache_key, cache_value, cache_position, cursor), [query] if rotating else []
    body = functools.partial(_body, shape=shape, slots=cache_position.shape[2], rotating=rotating, sinks=sinks_of(rows))
    *states, rotated = (
        *arrays.in_place(body, states, out_type=out, grid=(batch,), parts=parts_for(heads))(
            packed, place, *([inv_freq] if rotating else [])
        ),
        *[None] * (not rotating),
    )
    return *states, rotated


def check(key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq, rows=None):
    """Raise ``NotImplementedError`` for GPUs, codes, dtypes, head dims and queries that the kernel does not take."""
    arrays.check_hopper()
    refuse_codes(cache_key, cache_value)
    arrays.check_floats(key)
    (_, heads, dim), group = key.shape, 0 if query is None else query.shape[2]
    if dim & (dim - 1) or not 2 <= dim <= 2 * THREADS:
        raise NotImplementedError(
            f"got {key.dtype} and head_dim {dim}, expected a float and a power of two up to {2 * THREADS}"
        )
    if heads * (group + 2) * dim > MOST or key.shape[0] * heads * cache_position.shape[2] >= 2**31:
        raise NotImplementedError(f"got key {key.shape} and {group} query heads, expected at most {MOST} elements of a row")
