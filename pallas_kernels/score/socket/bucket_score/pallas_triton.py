"""SOCKET's search as two Pallas Triton kernels: the votes of every bucket, then the sums of all tokens.

The second kernel looks up one entry for each byte of ids. Where 32 threads look up words of shared memory at random, one of
its 32 banks must serve three or four words, one after the other. So a table is within one bank, with a copy in another, and
each thread of a warp looks up in a bank of its own. 16 threads have a table each, for the same 16 tokens, and the other 16
threads have the copies, for the next tokens. At the end they add up what they found, by exchanges between threads. Shared
memory holds all tables at once, or 64 of them. After they are copied no thread waits for another, and ids are loaded ahead.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes, check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import check_fits
from pallas_kernels.formats.sign_codes import BLOCK
from pallas_kernels.machine import current_machine
from pallas_kernels.score.socket.bucket_score import lookup

_MULTIPROCESSORS = 132  # of an H100 or H200; each holds one program of the second kernel
_HOPPER = 9, 0
_START = 2048  # tokens that a program could score in the time that it takes to begin
_MOST_PAGES = 4  # more would not fit the registers: a page takes four of each thread


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        blocks: programs per list.
        num_warps: warps per program, of 32 tokens at a time each: 8, 16 or 32.
        ahead: steps whose ids are loaded ahead, 1 or 2. With 2, a step's ids are requested before the previous step
            begins, but they take registers.
    """

    blocks: int
    num_warps: int = 32
    ahead: int = 2

    def __post_init__(self):
        if self.num_warps not in (8, 16, 32) or self.blocks < 1 or self.ahead not in (1, 2):
            raise ValueError(f"bucket_score: got {self}, expected at least one block, 8, 16 or 32 warps, 1 or 2 steps ahead")


def default_config(lists: int, searched: int, passes: int = 1) -> Config:
    """Choose the number of programs that finish first, with one per multiprocessor, for lists of ``searched`` tokens."""
    # Several passes need more registers than each of 32 warps may have, and so does code for older GPUs.
    newer = (current_machine().capability or _HOPPER) >= _HOPPER
    warps = 32 if searched > 512 and passes == 1 and newer else 16
    steps = pl.cdiv(searched, 32 * warps)

    def duration(blocks):
        return pl.cdiv(lists * blocks, _MULTIPROCESSORS) * (pl.cdiv(steps, blocks) * 32 * warps + _START)

    blocks = min(range(1, min(steps, _MULTIPROCESSORS) + 1), key=duration)
    return Config(blocks=pl.cdiv(steps, pl.cdiv(steps, blocks)), num_warps=warps)


def _tables_kernel(query_ref, planes_ref, temperature_ref, table_ref, *, tables):
    # Of one head: query [G, D], table [L', C'], where what is behind table L is 0. Of all: planes [L, P, D], temperature [1].
    table = pl.program_id(2)
    (group, dim), bits = query_ref.shape, planes_ref.shape[1]
    # A bucket's first bits are a row and its last bits a column: so the softmax, a product over the bits, is the product of a
    # row's and a column's value.
    last = bits // 2
    rows, columns = 1 << (bits - last), 1 << last
    bucket = (jnp.arange(rows, dtype=jnp.int32) * columns)[:, None] + jnp.arange(columns, dtype=jnp.int32)[None, :]

    @pl.when(table >= tables)
    def _():
        table_ref[table, bucket] = jnp.zeros((rows, columns), jnp.float32)

    @pl.when(table < tables)
    def _():
        heads, sides = pl.next_power_of_2(group), pl.next_power_of_2(bits)  # the last head and plane are repeated
        pair = jnp.arange(heads * sides, dtype=jnp.int32)
        head, side = jnp.minimum(pair // sides, group - 1), jnp.minimum(pair % sides, bits - 1)
        product = jnp.sum(query_ref[head, :].astype(jnp.float32) * planes_ref[table, side, :], axis=1)
        soft = jnp.tanh(product) / dim**0.5 / temperature_ref[0]
        # The log of a bit's factor: the log of the likelier side, and how much less the other side has.
        likelier, other = -jnp.log(1 + jnp.exp(-2 * jnp.abs(soft))), 2 * jnp.abs(soft)
        likelier, other, sign = (x.reshape(heads, 1, sides) for x in (likelier, other, (soft >= 0).astype(jnp.int32)))
        side = jnp.arange(sides, dtype=jnp.int32)[None, :]

        def part(count, begin, end):
            """Multiply over the bits from ``begin`` to ``end - 1``, which count to ``count``: float32 [G, count]."""
            number = jnp.arange(count, dtype=jnp.int32)[:, None]
            bit = (number >> jnp.clip(end - 1 - side, 0, end - begin - 1)) & 1
            real = jnp.broadcast_to((side >= begin) & (side < end), bit.shape)
            logs = likelier - jnp.where(bit[None] == sign, 0.0, other)
            return jnp.exp(jnp.sum(jnp.where(real[None], logs, 0.0), axis=2))

        real = (jnp.arange(heads, dtype=jnp.int32) < group)[:, None]
        row = jnp.where(real, part(rows, 0, bits - last), 0.0)
        column = part(columns, bits - last, bits)
        table_ref[table, bucket] = jnp.sum(row[:, :, None] * column[:, None, :], axis=0)


def _sums_kernel(
    table_ref, ids_ref, norm_ref, position_ref, cursor_ref, score_ref,
    *, first, num_local, tables, pages, blocks, steps, threads, ahead, interpret,
):  # fmt: skip
    # Of one list: table [L', C'], ids [N, L * 16], norm, position and score [S]. Of all: cursor [B].
    b, begin = pl.program_id(0), pl.program_id(2) * steps * threads
    slots = position_ref.shape[0]
    near = jnp.minimum(cursor_ref[b] - num_local, slots)
    passes = table_ref.shape[0] // (pages * BLOCK)
    row, column = jnp.arange(threads, dtype=jnp.int32), jnp.arange(BLOCK, dtype=jnp.int32)[None, :]
    # The steps of this program in which something is searched: from ``low`` to ``high - 1``. The last program has all steps
    # that are left, and searches little or nothing in them.
    end = jnp.where(pl.program_id(2) == blocks - 1, slots, jnp.minimum(begin + steps * threads, slots))
    low = jnp.maximum(first - begin, 0) // threads
    high = jnp.maximum(jnp.minimum(near, end) - begin + threads - 1, 0) // threads
    low = jnp.minimum(low, high)

    if not interpret:
        lookup.reserve(pages, cursor_ref[b] < -1, score_ref)

    def ids_of(step, number, page):
        """Load bytes [T, 16] of one table for each thread: the buckets of its 16 tokens. They are read only once."""
        block = jnp.minimum((begin + step * threads) // BLOCK + row // BLOCK, ids_ref.shape[0] - 1)
        table = jnp.minimum((number * pages + page) * BLOCK + row % BLOCK, tables - 1)  # behind the last all votes are 0
        at = ids_ref.at[block[:, None], (table * BLOCK)[:, None] + column]
        return plt.load(at, mask=jnp.full((threads, BLOCK), step < high), eviction_policy="evict_first")

    def tokens_of(step):
        slot = begin + step * threads + row
        real = (slot < slots) & (step < high)
        return plt.load(norm_ref.at[slot], mask=real, other=0), plt.load(position_ref.at[slot], mask=real, other=-1)

    def add_tables(number, order):
        """Add up the tables of one pass over the tokens, and return a value that is made last."""
        start = [tuple(ids_of(low + later, number, page) for page in range(pages)) for later in range(ahead)]
        tokens = tokens_of(low)
        look = lookup.Tables(table_ref, number, pages, threads, order, interpret)

        def add(step, carry):
            (ids, *waiting), (norm, position), order = carry
            slot = begin + step * threads + row
            inside = slot < slots
            before = plt.load(score_ref.at[slot], mask=inside & (number > 0), other=0) if passes > 1 else None
            found = None
            for page in range(pages):
                found = look.add(page, ids[page], found)
            waiting.append(tuple(ids_of(step + ahead, number, page) for page in range(pages)))
            total = look.total(found)
            if passes > 1:
                total, order = jnp.where(number > 0, before, 0.0) + total, look.after(order, total)
            searched = (position >= 0) & (slot >= first) & (slot < near)
            score = jnp.where(searched, total * norm.astype(jnp.float32), -jnp.inf)
            score = score if passes == 1 else jnp.where(number == passes - 1, score, total)
            plt.store(score_ref.at[slot], score, mask=inside)
            return tuple(waiting), tokens_of(step + 1), order

        return lax.fori_loop(low, high, add, (tuple(start), tokens, order))[2]

    lax.fori_loop(0, (low < high).astype(jnp.int32) * passes, add_tables, jnp.zeros((threads,), jnp.int32))

    def clear(step, _):
        slot = begin + jnp.where(step < low, step, step + high - low) * threads + row
        plt.store(score_ref.at[slot], jnp.full((threads,), -jnp.inf, jnp.float32), mask=slot < slots)
        return _

    lax.fori_loop(0, jnp.maximum(end - begin + threads - 1, 0) // threads - (high - low), clear, jnp.int32(0))


def _pages(tables: int) -> tuple[int, int]:
    """Count the passes over all tokens, and the pages of `BLOCK` tables in each pass."""
    most = _MOST_PAGES
    while most > 1 and lookup.room(most) > current_machine().shared_memory:
        most //= 2
    pages = pl.cdiv(tables, BLOCK)
    passes = pl.cdiv(pages, most)
    return passes, pl.cdiv(pages, passes)


def bucket_score(
    query, planes, temperature, ids, norm, position, cursor, *, first, num_local,
    config: Config | None = None, interpret=False,
):  # fmt: skip
    """Add up the soft votes for each token's buckets, times its value's norm; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, slots = position.shape
    tables, bits = planes.shape[:2]
    searched = max(slots - num_local, 1)
    passes, pages = _pages(tables)
    config = default_config(batch * heads, searched, passes) if config is None else config
    threads = 32 * config.num_warps
    steps = pl.cdiv(searched, config.blocks * threads)
    temperature = temperature.reshape(1)
    # Of fewer than 16 entries, what is behind them may hold anything.
    padded = jax.ShapeDtypeStruct((batch, heads, passes * pages * BLOCK, max(1 << bits, lookup.ENTRIES)), jnp.float32)
    table = triton_call(
        functools.partial(_tables_kernel, tables=tables),
        grid=(batch, heads, padded.shape[2]),
        in_specs=[of_head(query), whole(planes), whole(temperature)],
        out_specs=of_head(padded),
        out_shape=padded,
        name="bucket_tables",
        interpret=interpret,
    )(query, planes, temperature)
    return triton_call(
        functools.partial(
            _sums_kernel, first=first, num_local=num_local, tables=tables, pages=pages, blocks=config.blocks,
            steps=steps, threads=threads, ahead=config.ahead, interpret=interpret,
        ),
        grid=(batch, heads, config.blocks),
        in_specs=[*map(of_head, (table, ids, norm, position)), whole(cursor)],
        out_specs=of_head(position),
        out_shape=jax.ShapeDtypeStruct(position.shape, jnp.float32),
        name="bucket_sums",
        num_warps=config.num_warps,
        interpret=interpret,
    )(table, ids, norm, position, cursor)  # fmt: skip


def check(query, planes, temperature, ids, norm, position, cursor, *, first, num_local):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    bits, dim = planes.shape[1:]
    if ids.dtype != jnp.uint8 or not 2 <= bits <= 8:
        raise NotImplementedError(f"got {bits} bits in {ids.dtype}, expected 2 to 8 in uint8")
    check_head_dim(dim)
    check_bytes(ids)
    check_fits(lookup.room(1))
