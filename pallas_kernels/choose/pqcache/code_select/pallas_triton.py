"""Selection by product-quantised keys as three Pallas Triton kernels. Only codes are scored, and there are few codes.

1. ``code_count``, grid (B, H, blocks): a program counts in shared memory how many searched slots of its block have each code,
   and computes a share of the products of queries and centroids.
2. ``code_cut``, grid (B, H): a program computes the score of every code from these products, and the threshold that as many
   slots reach as are wanted. Codes of equal score are treated as one code.
3. ``code_list``, grid (B, H, blocks): a block's best slots go into the list behind the best slots of earlier blocks, whose
   number follows from the counts. The programs also write all other entries. The result does not depend on their order.
"""

import dataclasses
import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_head
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes
from pallas_kernels._triton.kth_histogram import histogram
from pallas_kernels._triton.kth_search import ALL, INFINITE, NEVER, find, order_key, rank
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.region_list import fill, put
from pallas_kernels.formats import bit_codes
from pallas_kernels.numerics import finite_or_zero

AHEAD = 8  # blocks whose counts are loaded together
MOST_HEADS = 16  # query heads of a group, whose scores of all codes one program holds
MOST_CODES = 8192  # a program has as many counters in shared memory as slots in its block


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: slots per program, a power of two, 64 to 8192; at least as many as there are codes.
        num_warps: most warps per program; a program has no more threads than slots or codes.
    """

    block: int = MOST_CODES
    num_warps: int = 16

    def __post_init__(self):
        if not 64 <= self.block <= MOST_CODES or self.block & (self.block - 1):
            raise ValueError(f"code_select: got {self}, expected a power of two from 64 to {MOST_CODES}")


def _code_of(ids_ref, slot, bits):
    """Read the codes of slots [N]: int32. ``ids_ref`` is uint8, all bytes of one head; slots behind the last get any code."""
    codes, size = bit_codes.together(bits)
    begin = lax.rem(slot, codes) * bits  # where the code begins in its group
    byte = lax.div(slot, codes) * size + (begin >> 3)
    spans = max((at * bits % 8 + bits + 7) // 8 for at in range(codes))
    # The last byte of a short span is not of this code, and is masked away.
    held = (ids_ref[jnp.minimum(byte + i, ids_ref.shape[0] - 1)].astype(jnp.int32) << 8 * i for i in range(spans))
    return (functools.reduce(operator.or_, held) >> (begin & 7)) & ((1 << bits) - 1)


def _counted(count_ref, blocks):
    """Count the searched slots of the first ``blocks`` blocks that have each code: int32 [N]."""
    code = jnp.arange(count_ref.shape[1], dtype=jnp.int32)

    def add(step, total):
        for i in range(AHEAD):
            row = step * AHEAD + i
            there = jnp.broadcast_to(row < blocks, code.shape)
            total = total + plt.load(count_ref.at[row, code], mask=there, other=0).astype(jnp.int32)
        return total

    return lax.fori_loop(0, pl.cdiv(blocks, AHEAD), add, jnp.zeros(code.shape, jnp.int32))


def _count(
    query_ref, centroid_ref, ids_ref, stop_ref, count_ref, table_ref, *, first, bits, blocks, block, threads, interpret
):
    # Of one head: query [G, D]; centroid [M, C, D/M]; ids [bytes]; table [G, M * C]. Of a row: stop [1]. Of this program:
    # count [N].
    program, codes = pl.program_id(2), count_ref.shape[0]
    slot = program * block + jnp.arange(block, dtype=jnp.int32)
    inside = (slot >= first) & (slot < stop_ref[0])
    code = jnp.where(inside, _code_of(ids_ref, slot, bits), -1)
    _multiply(query_ref, centroid_ref, table_ref, program, blocks)
    number = jnp.arange(block, dtype=jnp.int32)
    plt.store(count_ref.at[number], histogram(code, threads, interpret).astype(jnp.int16), mask=number < codes)


def _multiply(query_ref, centroid_ref, table_ref, program, programs):
    """Write a program's share of the table: products of every query head with some centroids."""
    (group, dim), (_, count, width), centers = query_ref.shape, centroid_ref.shape, table_ref.shape[1]
    share = pl.next_power_of_2(pl.cdiv(centers, programs))
    shape = share, pl.next_power_of_2(width)
    center = program * share + jnp.arange(share, dtype=jnp.int32)
    part, channel = lax.div(center, count), jnp.arange(shape[1], dtype=jnp.int32)
    row, own, column = (
        jnp.broadcast_to(x, shape) for x in (part[:, None], lax.rem(center, count)[:, None], channel[None, :])
    )
    asked = (jnp.broadcast_to(center[:, None], shape) < centers) & (column < width)
    centroid = plt.load(centroid_ref.at[row, own, column], mask=asked, other=0)
    for head in range(group):
        query = plt.load(query_ref.at[head, row * width + column], mask=asked, other=0).astype(jnp.float32)
        product = jnp.sum(query * centroid, axis=1) / math.sqrt(dim)
        plt.store(table_ref.at[head, center], product, mask=center < centers)


def _cut(count_ref, table_ref, stop_ref, wanted_ref, key_ref, cut_ref, *, parts, block, capacity):
    # Of one head: count [blocks, N]; table [G, M * C]. Of a row: stop, wanted [1]. Results of one head: key [N]; cut [4].
    (blocks, codes), (group, centers) = count_ref.shape, table_ref.shape
    count, bits = centers // parts, bit_codes.bits_of(centers // parts)
    code = jnp.arange(codes, dtype=jnp.int32)
    at = [part * count + jnp.minimum((code >> part * bits) & ((1 << bits) - 1), count - 1) for part in range(parts)]
    logits = [functools.reduce(operator.add, (table_ref[head, x] for x in at)) for head in range(group)]
    total = _counted(count_ref, jnp.minimum(pl.cdiv(stop_ref[0], block), blocks))
    there, weight = total > 0, total.astype(jnp.float32)

    def share(logits):  # the log of a query head's softmax
        logits = jnp.where(there, logits, -jnp.inf)
        top = finite_or_zero(jnp.max(logits))
        return logits - finite_or_zero(top + jnp.log(jnp.sum(weight * jnp.exp(logits - top))))

    shares = [share(x) for x in logits]
    most = finite_or_zero(functools.reduce(jnp.maximum, shares))
    score = most + jnp.log(functools.reduce(operator.add, (jnp.exp(x - most) for x in shares)))
    # A searched slot must beat all other slots even when its score is -inf.
    key = jnp.where(there, order_key(jnp.maximum(score, jnp.finfo(jnp.float32).min)), NEVER)
    key_ref[...] = key

    def reach(pivot):
        return jnp.sum(jnp.where(key >= pivot, total, 0))

    def below(pivot):
        return jnp.max(jnp.where(key < pivot, key, NEVER))

    may = key > NEVER
    low, high = jnp.min(jnp.where(may, key, INFINITE)), jnp.max(key)
    held, wanted = jnp.sum(jnp.where(may, total, 0)), jnp.clip(wanted_ref[0], 0, capacity)
    threshold, reached, over = find(reach, below, low, jnp.maximum(high, low) + 1, held, jnp.maximum(wanted, 1), 0)
    cut_ref[0], cut_ref[1] = threshold, jnp.where(reached > wanted, wanted - over, ALL)
    cut_ref[2] = jnp.minimum(held, wanted)


def _list(
    count_ref, key_ref, cut_ref, ids_ref, stop_ref, length_ref, slots_ref, mask_ref, *, first, bits, capacity, block,
    interpret,
):  # fmt: skip
    # Of one head: count [blocks, N]; key [N]; cut [4]; ids [bytes]. Of a row: stop, length [1]. Results of one head: slots,
    # mask [E].
    program, stop = pl.program_id(2), stop_ref[0]
    threshold, ties, chosen = (cut_ref[i] for i in range(3))
    fill(slots_ref, mask_ref, count_ref.shape[0], first, capacity, chosen, stop, length_ref[0], interpret)
    begin = program * block

    @pl.when((begin < stop) & (begin + block > first) & (chosen > 0))
    def list_block():
        slot = begin + jnp.arange(block, dtype=jnp.int32)
        inside = (slot >= first) & (slot < stop)
        code = _code_of(ids_ref, slot, bits)
        own, before = plt.load(key_ref.at[code], mask=inside, other=NEVER), _counted(count_ref, program)
        key = key_ref[...]
        over = jnp.sum(jnp.where(key > threshold, before, 0))
        equal = jnp.sum(jnp.where(key == threshold, before, 0))
        keep, place, _, _ = rank(own, threshold, ties, over, equal)
        keep = keep & (place < chosen)
        put(slots_ref, first + place, slot, keep, interpret)


def code_select(
    query, centroids, ids, stop, length, wanted, *, first, capacity, room, config: Config | None = None, interpret=False
):
    """List the first, the best searched and the last slots by their codes; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    batch, heads, group, _ = query.shape
    parts, count = centroids.shape[2:4]
    bits, block = parts * bit_codes.bits_of(count), config.block
    codes = 1 << bits
    ids = ids.reshape(batch, heads, -1)
    blocks = pl.cdiv(ids.shape[2] * 8 // bits, block)
    own_row = pl.BlockSpec((1,), lambda b, *_: (b,))

    def shape(dtype, *size):
        return jax.ShapeDtypeStruct((batch, heads, *size), dtype)

    counted, table = shape(jnp.int16, blocks, codes), shape(jnp.float32, group, parts * count)
    threads = min(32 * config.num_warps, block)
    common = {"interpret": interpret, "num_warps": threads // 32}
    counted, table = triton_call(
        functools.partial(_count, first=first, bits=bits, blocks=blocks, block=block, threads=threads, interpret=interpret),
        grid=(batch, heads, blocks),
        in_specs=[*map(of_head, (query, centroids, ids)), own_row],
        out_specs=[pl.BlockSpec((None, None, None, codes), lambda b, h, i: (b, h, i, 0)), of_head(table)],
        out_shape=[counted, table],
        name="code_count",
        **common,
    )(query, centroids, ids, stop)
    results = [shape(jnp.int32, codes), shape(jnp.int32, 4)]
    key, cut = triton_call(
        functools.partial(_cut, parts=parts, block=block, capacity=capacity),
        grid=(batch, heads),
        in_specs=[*map(of_head, (counted, table)), own_row, own_row],
        out_specs=[*map(of_head, results)],
        out_shape=results,
        name="code_cut",
        interpret=interpret,
        num_warps=min(max(codes // 32, 1), config.num_warps),
    )(counted, table, stop, wanted)
    results = [shape(x, first + capacity + room) for x in (jnp.int32, jnp.bool_)]
    return triton_call(
        functools.partial(_list, first=first, bits=bits, capacity=capacity, block=block, interpret=interpret),
        grid=(batch, heads, blocks),
        in_specs=[*map(of_head, (counted, key, cut, ids)), own_row, own_row],
        out_specs=[*map(of_head, results)],
        out_shape=results,
        name="code_list",
        **common,
    )(counted, key, cut, ids, stop, length)


def check(query, centroids, ids, stop, length, wanted, *, first, capacity, room):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    parts, count = centroids.shape[2:4]
    codes = 1 << parts * bit_codes.bits_of(count)
    if query.shape[2] > MOST_HEADS:
        raise NotImplementedError(f"got groups of {query.shape[2]} query heads, expected at most {MOST_HEADS}")
    if codes > MOST_CODES:
        raise NotImplementedError(f"got {parts} parts of {count} centroids, which are {codes} codes, expected {MOST_CODES}")
    check_bytes(ids)
    if not ids.size or ids.shape[2] > 1 << 26:
        raise NotImplementedError(f"got ids {ids.shape}, expected 1 to {1 << 26} groups of slots")
