"""Decode attention over packed blocks through Mosaic GPU; `dense_decode` attends to the buffer of raw tokens.

As for Triton, a program takes a share of one list of blocks, goes through its segments, and writes one partial for each, in
the segment's basis: program j writes that of segment s to row ``j + s``. Its tokens' logits stay in registers. A second
kernel adds up the partials of each segment, and turns the sums into the model's basis.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.packed import BYTE, MOST_QUERIES, add_weighted, products
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._triton.packed_vectors import check_format, query_table
from pallas_kernels.attend.dense_decode import pallas_mosaic_gpu as dense_kernel
from pallas_kernels.numerics import LOG2_E, finite_or_zero

TOKENS = 128  # of a program
TOGETHER = 4  # values that a thread reads together
JOINED = 16  # partials, or rows of a basis, that a thread reads together
WIDTH = 32  # columns of a basis that a program joins with
TAKES = f"{arrays.HOPPER}, D of 32 to 256 in one dtype, G up to {MOST_QUERIES}, blocks of up to {TOKENS} tokens"


def _body(
    table_ref, key_ref, key_words_ref, value_ref, value_words_ref, blocks_ref, count_ref, last_ref, *refs,
    heads, slots, segments, group, padded, dim, granule, span, scale, splits,
):  # fmt: skip
    # table [L, M * D * Gp]; keys and values [L * S, r], their words [L * S, W]; blocks [L, K]; count [L]; last [B]; owner
    # [B, P] if given; then out [L, X, G, D], lse [L, X, G], segment [L, X].
    *owner_ref, out_ref, lse_ref, segment_ref, rows, weights, sums = refs
    line, j, listed, share = lax.axis_index("x"), lax.axis_index("y"), blocks_ref.shape[1], TOKENS // granule
    b, count, partials = lax.div(line, heads), arrays.scalar(count_ref, line), segment_ref.shape[1]
    first = j * share
    stop = jnp.minimum(first + share, count)
    last = arrays.scalar(last_ref, b)

    def owner_of(block, load):
        if not owner_ref:
            return jnp.minimum(lax.div(block, span), last)
        return load(owner_ref[0], b * owner_ref[0].shape[1] + jnp.clip(block, 0, owner_ref[0].shape[1] - 1))

    def owner_at(entry):  # behind the list this is the last segment, so that the last rows get written too
        block = arrays.scalar(blocks_ref, line * listed + jnp.minimum(entry, listed - 1))
        return jnp.where(entry < count, owner_of(jnp.where(entry < count, block, 0), arrays.scalar), segments - 1)

    # See `pallas_triton`: two neighbours may share a segment, but they write it to different rows.
    low, high = jnp.where(j == 0, 0, owner_at(first)), jnp.where(j == splits - 1, segments - 1, owner_at(first + share))
    token = arrays.counted(TOKENS)
    entry = first + lax.div(token, granule)
    seen = (entry < stop) & (token < share * granule)
    block = arrays.load(blocks_ref, jnp.where(seen, line * listed + entry, -1))
    owner = owner_of(block, arrays.load)
    row = line * slots + block * granule + lax.rem(token, granule)
    read = jnp.where(seen, row, line * slots)
    logits = products((table_ref, key_ref, key_words_ref), line, read, owner * (dim * padded), padded)[:group]
    logits = [x * (scale * LOG2_E) for x in logits]
    lanes = dim // BYTE
    step = TOGETHER * (t.THREADS // lanes)
    entries = arrays.counted(t.THREADS * group * BYTE)

    def attend(s, carry):
        mine = seen & (owner == s)
        arrays.meet()
        arrays.store_shared(rows, token, jnp.where(mine, row, -1))
        at = (line * partials + j + s) * group
        divisors = []
        for g, logit in enumerate(logits):
            logit = jnp.where(mine, logit, -jnp.inf)
            shift = finite_or_zero(jnp.max(logit))
            weight = jnp.exp2(logit - shift)
            total = jnp.sum(weight)
            arrays.store_shared(weights, g * TOKENS + token, weight)
            arrays.put(lse_ref, at + g, (shift + jnp.log2(total)) / LOG2_E)
            divisors.append(jnp.where(total > 0, total, 1.0))
        arrays.meet()

        def add(i, carry):
            return add_weighted(carry, (value_ref, value_words_ref), rows, weights, i * step, TOGETHER)

        nothing = arrays.spread(0.0, t.THREADS * group * BYTE, jnp.float32)
        added = lax.fori_loop(0, TOKENS // step, add, nothing)
        # A thread has 8 channels of each head; threads of one byte add up theirs.
        number, thread = lax.shift_right_logical(entries, 7), entries & (t.THREADS - 1)
        channel = lax.rem(thread, lanes) * BYTE + lax.rem(number, BYTE)
        arrays.store_shared(sums, (lax.div(thread, lanes) * group + lax.div(number, BYTE)) * dim + channel, added)
        arrays.meet()
        for g, divisor in enumerate(divisors):
            channel = arrays.counted(arrays.size_of(dim))
            held = jnp.minimum(channel, dim - 1)
            parts = [arrays.load_shared(sums, (i * group + g) * dim + held) for i in range(t.THREADS // lanes)]
            total = functools.reduce(jnp.add, parts) / divisor
            arrays.store(out_ref, jnp.where(channel < dim, (at + g) * dim + channel, -1), total)
        arrays.put(segment_ref, line * partials + j + s, s)
        return carry

    lax.fori_loop(low, high + 1, attend, 0)


def _body_join(
    out_ref, lse_ref, segment_ref, raw_ref, raw_lse_ref, basis_ref, merged_ref, weights, numbers, sums, *, group, dim, width
):
    # out [L, X, G, D], lse [L, X, G], segment [L, X]; of the raw buffer out [L, N, G, D] and lse [L, N, G]; basis
    # [L, M, D, D]; merged [L, G, D], of which a program computes ``width`` columns of a head. In shared memory weight and
    # segment of each partial, [X + N], and the sums of each segment, [M, D].
    line, head, left = lax.axis_index("x"), lax.axis_index("y"), lax.axis_index("z") * width
    partials, raws, segments = segment_ref.shape[1], raw_lse_ref.shape[1], basis_ref.shape[1]
    number = arrays.counted(weights.shape[0])
    packed, raw = number < partials, (number >= partials) & (number < partials + raws)
    segment = arrays.load(segment_ref, jnp.where(packed, line * partials + number, -1), -1)
    lse = arrays.load(lse_ref, jnp.where(packed, (line * partials + number) * group + head, -1), -jnp.inf)
    other = arrays.load(raw_lse_ref, jnp.where(raw, (line * raws + number - partials) * group + head, -1), -jnp.inf)
    lse = jnp.maximum(lse, other)
    weight = jnp.exp(lse - finite_or_zero(jnp.max(lse)))
    total = jnp.sum(weight)
    weight = weight / jnp.where(total > 0, total, 1.0)
    highest = jnp.max(jnp.where(weight > 0, segment, -1))  # segment with a token
    arrays.store_shared(weights, number, weight)
    arrays.store_shared(numbers, number, segment)
    arrays.meet()
    channel = arrays.counted(arrays.size_of(dim))
    held = jnp.minimum(channel, dim - 1)

    def of(memory, x):
        return arrays.load_shared(memory, arrays.spread(x, channel.shape[0]))

    def collect(step, carry):
        rows = [jnp.minimum(step * JOINED + i, partials - 1) for i in range(JOINED)]
        parts = [arrays.load(out_ref, ((line * partials + x) * group + head) * dim + held) for x in rows]
        for i, (x, part) in enumerate(zip(rows, parts, strict=True)):  # all are loaded before anything is added
            share = jnp.where(step * JOINED + i < partials, of(weights, x), 0.0)
            carry = tuple(y + jnp.where(of(numbers, x) == s, share * part, 0.0) for s, y in enumerate(carry))
        return carry

    nothing = arrays.spread(0.0, channel.shape[0], jnp.float32)
    for s, x in enumerate(lax.fori_loop(0, -(-partials // JOINED), collect, (nothing,) * segments)):
        arrays.store_shared(sums, s * channel.shape[0] + channel, x)
    arrays.meet()
    thread = arrays.counted(t.THREADS)
    column, part = left + lax.rem(thread, width), lax.div(thread, width)
    each = dim * width // t.THREADS  # channels of a segment that a thread multiplies

    def project(step, total):
        s, first = lax.div(step, each // JOINED), lax.rem(step, each // JOINED) * JOINED
        rows = [part * each + (first + i) for i in range(JOINED)]
        bases = [arrays.load(basis_ref, column, rows=((line * segments + s) * dim + row, dim)) for row in rows]
        for row, x in zip(rows, bases, strict=True):
            total = total + arrays.load_shared(sums, s * channel.shape[0] + row) * x
        return total

    nothing = arrays.spread(0.0, t.THREADS, jnp.float32)
    merged = lax.fori_loop(0, (highest + 1) * (each // JOINED), project, nothing)
    arrays.meet()
    arrays.store_shared(sums, thread, merged)
    arrays.meet()
    parts = [arrays.load_shared(sums, i * width + lax.rem(thread, width)) for i in range(t.THREADS // width)]
    for i in range(raws):
        share = arrays.load_shared(weights, arrays.spread(partials + i, t.THREADS))
        x = arrays.load(raw_ref, ((line * raws + i) * group + head) * dim + column)
        parts.append(jnp.where(share > 0, x * share, 0.0))
    at = jnp.where(part < 1, (line * group + head) * dim + column, -1)
    arrays.store(merged_ref, at, functools.reduce(jnp.add, parts))


def packed_attention(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """Attend to the listed packed blocks and the raw buffer in one softmax."""
    rows, heads, segments, group, _, dim = parts.shape
    lists, listed, slots = rows * heads, blocks.shape[2], key[0].shape[2]
    splits = -(-listed // (TOKENS // granule))
    partials = splits + segments - 1
    table = query_table(parts)
    body = functools.partial(
        _body, heads=heads, slots=slots, segments=segments, group=group, padded=table.shape[1] // (segments * dim), dim=dim,
        granule=granule, span=span, scale=scale, splits=splits,
    )  # fmt: skip
    shapes = (
        ((lists, partials, group, dim), jnp.float32),
        ((lists, partials, group), jnp.float32),
        ((lists, partials), jnp.int32),
    )
    scratch = ((TOKENS,), jnp.int32), ((group * TOKENS,), jnp.float32), ((t.THREADS * BYTE * group,), jnp.float32)
    packed = [x.reshape(lists * slots, -1) for pair in (key, value) for x in pair]
    out, lse, segment = arrays.program(
        body, [jax.ShapeDtypeStruct(*x) for x in shapes], grid=(lists, splits), scratch=[plgpu.SMEM(*x) for x in scratch]
    )(table, *packed, blocks.reshape(lists, listed), count.reshape(-1), last, *([] if owner is None else [owner]))
    buffer_key, buffer_value, position = recent
    limit = jnp.full((rows,), buffer_key.shape[2], jnp.int32)
    raw = dense_kernel.dense_decode(query, buffer_key, buffer_value, position=position, limit=limit, scale=scale, parts=True)
    raw_out, raw_lse = (x.reshape(lists, *x.shape[2:]) for x in raw)
    each, width = arrays.size_of(partials + raw_lse.shape[1]), min(WIDTH, dim)
    scratch = ((each,), jnp.float32), ((each,), jnp.int32), ((segments * arrays.size_of(dim),), jnp.float32)
    (merged,) = arrays.program(
        functools.partial(_body_join, group=group, dim=dim, width=width),
        [jax.ShapeDtypeStruct((lists, group, dim), query.dtype)],
        grid=(lists, group, dim // width),
        scratch=[plgpu.SMEM(*x) for x in scratch],
    )(out, lse, segment, raw_out, raw_lse, basis.reshape(lists, segments, dim, dim))
    return merged.reshape(query.shape)


def check(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """Raise ``NotImplementedError`` for other GPUs, head dims, dtypes and sizes than the kernel takes."""
    arrays.check_hopper()
    check_format(query.shape[-1], *(x.dtype for x in (parts, query, key[0], value[0], *recent[:2])))
    dense_kernel.check(query, *recent[:2])
    rows, heads, slots, rank = key[0].shape
    if parts.shape[3] > MOST_QUERIES or granule > TOKENS or not blocks.shape[2] * rank or rows * heads * slots >= 2**31:
        raise NotImplementedError(
            f"got {parts.shape[3]} query heads, blocks of {granule} and keys {key[0].shape}, expected at most {MOST_QUERIES} "
            f"heads and blocks of {TOKENS}"
        )
