"""Decode attention over packed blocks through Mosaic GPU; plain JAX attends to the buffer of raw tokens and joins the parts.

As for Triton, a program takes a share of one list of blocks, goes through its segments, and writes one partial for each, in
the segment's basis: program j writes that of segment s to row ``j + s``. Its tokens' logits stay in registers.
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
from pallas_kernels.numerics import LOG2_E, finite_or_zero

TOKENS = 256  # of a program
TOGETHER = 4  # values that a thread reads together


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


def _recent(query, recent, scale):
    """Attend to the raw tokens of the buffer: float32 [B, H, G, D] and lse [B, H, G]."""
    key, value, position = recent
    held = position[..., None] >= 0
    key, value = (jnp.where(held, x, 0).astype(jnp.float32) for x in (key, value))
    exact = {"precision": lax.Precision.HIGHEST}
    logits = jnp.einsum("bhgd,bhsd->bhgs", query.astype(jnp.float32), key, **exact) * scale
    logits = jnp.where(position[:, :, None] >= 0, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weight = jnp.exp(logits - finite_or_zero(lse)[..., None])
    return jnp.einsum("bhgs,bhsd->bhgd", weight, value, **exact), lse


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
    out, lse, segment = (x.reshape(rows, heads, *x.shape[1:]) for x in (out, lse, segment))
    raw, raw_lse = _recent(query, recent, scale)
    whole = finite_or_zero(jax.nn.logsumexp(jnp.concatenate([lse, raw_lse[:, :, None]], axis=2), axis=2))
    share = jnp.exp(lse - whole[:, :, None])
    number = jnp.arange(segments, dtype=jnp.int32).reshape(1, 1, 1, -1)
    member = jnp.where(segment[..., None] == number, 1.0, 0.0)
    exact = {"precision": lax.Precision.HIGHEST}
    each = jnp.einsum("bhxm,bhxge->bhmge", member, jnp.where(share > 0, share, 0)[..., None] * out, **exact)
    merged = jnp.einsum("bhmge,bhmed->bhgd", each, basis, **exact)
    return (merged + raw * jnp.exp(raw_lse - whole)[..., None]).astype(query.dtype)


def check(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """Raise ``NotImplementedError`` for other GPUs, head dims, dtypes and sizes than the kernel takes."""
    arrays.check_hopper()
    check_format(query.shape[-1], *(x.dtype for x in (parts, query, key[0], value[0], *recent[:2])))
    rows, heads, slots, rank = key[0].shape
    if parts.shape[3] > MOST_QUERIES or granule > TOKENS or not blocks.shape[2] * rank or rows * heads * slots >= 2**31:
        raise NotImplementedError(
            f"got {parts.shape[3]} query heads, blocks of {granule} and keys {key[0].shape}, expected at most {MOST_QUERIES} "
            f"heads and blocks of {TOKENS}"
        )
