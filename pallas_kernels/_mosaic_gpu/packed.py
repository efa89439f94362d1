"""Packed vectors on Mosaic GPU: their products with queries, and their weighted sums.

As for Triton (`pallas_kernels._triton.packed_vectors`), in a product a thread has a vector: it walks through the bits that
are set, and reads the entries of all heads at each bit's channel from a table that stays in the first-level cache. In a sum
D / 8 threads share a vector, and each has one byte of the bitmap.
"""

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import plgpu

MOST_QUERIES = 8  # of a KV head, in registers
WORD, BYTE = 32, 8  # channels of a word of a bitmap, and of a byte


def products(refs, line, row: jax.Array, first: jax.Array, padded: int) -> tuple[jax.Array, ...]:
    """Multiply vectors with ``padded`` queries: as many float32 [N].

    Args:
        refs: in global memory the table [L, M * D * Gp] of `query_table`, values [L * P, r] and bitmaps [L * P, W].
        line: int32, the list.
        row: int32 [N], which of the L * P vectors.
        first: int32 [N], the entry of the table at which the vector's segment begins.
        padded: queries in the table.
    """
    ref, own, kind = plgpu.RefType(), t.own(row.shape[0] // t.THREADS), jnp.dtype(refs[1].dtype)
    out = plgpu.ShapeDtypeStruct(row.shape, jnp.float32, layout=own)
    width, rank, words = refs[0].shape[1], refs[1].shape[1], refs[2].shape[1]

    @plgpu.inline_mgpu(arg_types=((ref,) * 3, plgpu.Layout.WG_SPLAT, own, own), return_type=(out,) * padded)
    def run(ctx, refs, line, row, first):
        table, values, bitmap = (t.address(x) for x in refs)

        def product(row, first):
            query = t.at(table, t.element(t.number(t.value(line)), width, first), 4)
            word = [t.load_int(t.at(bitmap, t.element(row, words, t.number(k)), 4)) for k in range(words)]
            each = 8 if rank % 8 == 0 else 4 if kind.itemsize == 4 and rank % 4 == 0 else 1
            value = []
            for i in range(0, rank, each):
                value += t.load_some(t.at(values, t.element(row, rank, t.number(i)), kind.itemsize), kind, each)
            begin = [t.number(0)]  # values before each word
            for x in word[:-1]:
                begin.append(begin[-1] + t.popcount(x))
            left, base = word[0], t.number(0)  # bits of the word that are left, and the entry of the word's first channel
            sums = [t.float_number(0)] * padded
            for i in range(rank):
                # Of words that begin at the same value, all but the last are empty.
                for k in range(1, words):
                    here = begin[k] == i
                    left, base = here.select(word[k], left), here.select(t.number(WORD * k * padded), base)
                below = left - 1
                # The zeros below the lowest set bit are its channel. Where no bit is left, the value is zero.
                entry = base + t.popcount((left ^ -1) & below & 0x7FFFFFFF) * padded
                left = left & below
                heads = t.load_some(t.at(query, entry, 4), jnp.dtype(jnp.float32), padded)
                sums = [t.fused(total, (value[i], x)) for total, x in zip(sums, heads, strict=True)]
            return sums

        found = [product(*x) for x in zip(t.numbers_of(row), t.numbers_of(first), strict=True)]
        return tuple(t.made_of(list(x), floats=True) for x in zip(*found, strict=True))

    return run(refs, line, row, first)


def add_weighted(sums: jax.Array, refs, rows, weights, first: jax.Array, steps: int) -> jax.Array:
    """Add vectors times their weights to this thread's sums, float32 [128 * G * 8]: of each query the channels of a byte.

    Args:
        sums: as they are so far.
        refs: in global memory values [L * S, r] and bitmaps [L * S, W].
        rows: in shared memory int32 [N], which of the L * S vectors; one that is negative is left out, and not read.
        weights: in shared memory float32 [G * N].
        first: int32, the first of N for the first D / 8 threads; the next threads have the next vectors.
        steps: vectors of a thread.
    """
    ref, kind = plgpu.RefType(), jnp.dtype(refs[0].dtype)
    rank, words, number = refs[0].shape[1], refs[1].shape[1], rows.shape[0]
    lanes, group = words * (WORD // BYTE), weights.shape[0] // number
    own = t.own(group * BYTE)

    @plgpu.inline_mgpu(
        arg_types=(own, (ref,) * 2, ref, ref, plgpu.Layout.WG_SPLAT),
        return_type=plgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=own),
    )
    def run(ctx, sums, refs, rows, weights, first):
        sums = t.numbers_of(sums, floats=True)
        values, bitmap = (t.address(x) for x in refs)
        rows, weights = (t.number(t.address(x)) for x in (rows, weights))
        byte, mine = t.signed(t.thread() % lanes), t.signed(t.thread() // lanes)
        found = []
        for step in range(steps):  # all is loaded before anything is added
            at = (t.number(t.value(first)) + (mine + step * (t.THREADS // lanes))) * 4
            row = t.load_shared(rows + at)
            held, read = row >= 0, (row < 0).select(t.number(0), row)
            place = t.at(bitmap, t.element(read, words, t.number(0)), 4)
            word = [x for k in range(0, words, 4) for x in t.load_words(place, 4 * k, min(words, 4))]
            bits, before = word[0], t.number(0)
            for k in range(1, words):
                past = byte >= k * (WORD // BYTE)
                bits, before = past.select(word[k], bits), past.select(before + t.popcount(word[k - 1]), before)
            shift = (byte & 3) * BYTE
            before = before + t.popcount(bits & ((t.number(1) << shift) - 1))
            bits = bits >> shift
            index, some = t.element(read, rank, before), []
            for j in range(BYTE):
                kept = ((bits >> j) & 1) > 0
                place = t.at(values, t.plus(index, t.popcount(bits & ((1 << j) - 1))), kind.itemsize)
                some.append(t.load_at(place, kind, held & kept, 0))
            found.append((some, [t.load_shared_float(weights + (at + g * number * 4)) for g in range(group)]))
        for some, shares in found:
            pairs = ((x, share) for share in shares for x in some)
            sums = [t.fused(total, pair) for total, pair in zip(sums, pairs, strict=True)]
        return t.made_of(sums, floats=True)

    return run(sums, refs, rows, weights, first)
