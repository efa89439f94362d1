"""Tables in shared memory, where every thread of a warp looks up in a bank of its own: inline assembly.

A page is 16 tables. Entry c of table t of a page is at byte 256 c + 4 t, with a copy 64 bytes behind it: so each of the 32
banks has a table or a copy. Two pages share a region, in which the second page is 128 bytes behind the first. So the only
arithmetic of a look-up is to put a byte of ids into the second byte of an address.

The regions are the shared memory that Triton reserves for a kernel. Assembly cannot ask for as much (see `reserve`), and the
kernel must not do anything else that Triton uses shared memory for.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.sign_codes import BLOCK

ENTRIES = 16  # neighbours of a table, which a thread copies
REGION = 1 << 16  # bytes: 256 entries of two pages, twice
SHARED = "global_smem"  # what Triton calls it
_BYTES = 4  # bytes of a word
_STRIDE = 256  # bytes from an entry to the next one
_PAGE = 128  # bytes from one page to the other
_WARP = 32
_WORDS = BLOCK // _BYTES


def room(pages: int) -> int:
    """Return the bytes of shared memory that ``pages`` at a time take."""
    return pl.cdiv(pages, 2) * REGION


def reserve(pages: int, never: Array, ref):
    """Have Triton reserve `room` for up to four ``pages``.

    Triton reserves what its operations need. An exchange of an array between all threads needs as much as the array, if no
    part of it stays in its thread; with these sizes none stays, from 8 warps on. This exchange turns rows to columns. It
    never runs, but no compiler knows that.

    Args:
        pages: pages of this kernel.
        never: bool, a condition that is false.
        ref: float32 [S], anything.
    """

    @pl.when(never)
    def _():
        width = 128
        height = room(pages) // _BYTES // width
        i, j = jnp.arange(height, dtype=jnp.int32)[:, None], jnp.arange(width, dtype=jnp.int32)[None, :]
        source, target, size = i * width + j, i + height * j, ref.shape[0]
        plt.store(ref.at[target], plt.load(ref.at[source], mask=source < size, other=0), mask=target < size)


class Tables:
    """The tables of one pass in shared memory; where interpreted, they stay in place.

    Args:
        ref: float32 [L', C'], all tables.
        number: int32, the pass.
        pages: pages per pass, of `BLOCK` tables each.
        threads: number of threads of the program.
        order: int32 [T], a value that is made after the look-ups of the pass before.
        interpret: compute without assembly.
    """

    def __init__(self, ref, number: Array, pages: int, threads: int, order: Array, interpret: bool):
        self._ref, self._first, self._threads, self._interpret = ref, number * pages, threads, interpret
        if interpret:
            return
        row, column = jnp.arange(threads, dtype=jnp.int32), jnp.arange(ENTRIES, dtype=jnp.int32)[None, :]
        order = assembly("{bar.sync 0; mov.b32 $0, $1;}", [order])
        # A warp copies 16 entries of 16 tables at a time, and both copies of them at once.
        shares = ref.shape[1] // ENTRIES
        for begin in range(0, pages * shares, threads // _WARP):
            page, share, place = copying(begin, row, pages, shares)
            table = (self._first + page) * BLOCK + row % BLOCK
            entries = ref[table[:, None], (share * ENTRIES)[:, None] + column]
            every = begin + threads // _WARP <= pages * shares
            made = assembly(copy(every), [lax.bitcast_convert_type(entries, jnp.int32), *map(_wide, (place, order))], ENTRIES)
            order = jnp.max(made, axis=1)
        self._lane = _wide(assembly(ready(), [order]))

    def add(self, page: int, ids: Array, sums: Array | None) -> Array:
        """Add to ``sums`` float32 [T, 16], or to zeros, what the threads find for their ids uint8 [T, 16] in their tables."""
        if self._interpret:
            table = (self._first + page) * BLOCK + jnp.arange(self._threads, dtype=jnp.int32) % BLOCK
            found = self._ref[jnp.broadcast_to(table[:, None], ids.shape), ids.astype(jnp.int32)]
            return found if sums is None else sums + found
        return assembly(look_up(page, sums is None), [ids, self._lane, *([] if sums is None else [sums])], BLOCK, jnp.float32)

    def total(self, sums: Array) -> Array:
        """Sum over the 16 threads that have the same tokens: float32 [T], a token for each thread."""
        if self._interpret:
            return jnp.sum(sums.reshape(-1, BLOCK, BLOCK), axis=1).reshape(self._threads)
        made = jnp.sum(assembly(add_up(), [sums], BLOCK), axis=1, dtype=jnp.int32)
        return lax.bitcast_convert_type(made, jnp.float32)

    def after(self, order: Array, total: Array) -> Array:
        """Return ``order`` int32 [T] as a value that is made after ``total`` float32 [T]."""
        if self._interpret:
            return order
        return assembly("{.reg .b32 none; and.b32 none, $2, 0; or.b32 $0, $1, none;}", [order, total])


def _wide(x: Array) -> Array:
    return jnp.broadcast_to(x[:, None], (x.shape[0], BLOCK))


def copying(begin: int, row: Array, pages: int, shares: int) -> tuple[Array, Array, Array]:
    """Assign to each thread what it copies: a page, a share of its tables' entries, and the first entry's place or -1.

    Args:
        begin: the first warp's piece of the work; there are ``pages`` * ``shares`` pieces.
        row: int32 [T], the index of each thread.
        pages: the number of pages, of 16 tables each.
        shares: the number of shares of every table, of `ENTRIES` neighbours each.
    """
    piece = begin + row // _WARP
    page, share = jnp.minimum(piece // shares, pages - 1), piece % shares
    place = page // 2 * REGION + page % 2 * _PAGE + share * (ENTRIES * _STRIDE) + row % _WARP * _BYTES
    return page, share, jnp.where(piece < pages * shares, place, -1)


def copy(every: bool) -> str:
    """Write the assembly that copies a thread's entries, where it has a place for them, or ``every`` thread has.

    Operands: the entries; their first place, 16 times; the values that it returns, 16 times.
    """
    place, order = f"${2 * ENTRIES}", f"${3 * ENTRIES}"
    lines = [f".reg .b32 at; .reg .pred has; setp.ge.s32 has, {place}, 0; mov.b32 at, {SHARED}; add.s32 at, at, {place};"]
    held = "" if every else "@has "
    lines += [f"{held}st.shared.b32 [at + {i * _STRIDE}], ${ENTRIES + i};" for i in range(ENTRIES)]
    lines += [f"mov.b32 ${i}, {order};" for i in range(ENTRIES)]
    return "{" + " ".join(lines) + "}"


def ready() -> str:
    """Write the assembly that waits until all threads have copied, and returns the byte of a thread's bank."""
    return "{.reg .b32 none; bar.sync 0; and.b32 none, $1, 0; mov.u32 $0, %laneid; mad.lo.s32 $0, $0, 4, none;}"


def look_up(page: int, nothing: bool) -> str:
    """Write the assembly that finds an entry for each of 16 bytes, and adds it to 16 sums, or starts them if ``nothing``.

    Operands: the ids in four words; the byte of the thread's bank, 16 times; the sums.
    """
    offset = page // 2 * REGION + page % 2 * _PAGE
    ids, lane = BLOCK, BLOCK + _WORDS
    sums = lane + BLOCK
    lines = [f".reg .b32 at, base; .reg .f32 found; mov.b32 base, {SHARED};"]
    for i in range(BLOCK):
        # The byte of the bank, the id, and zeros. Adding the base takes no instruction: it is the same in all threads.
        lines.append(f"prmt.b32 at, ${ids + i // _BYTES}, ${lane}, {0x5504 | i % _BYTES << 4:#x}; add.s32 at, at, base;")
        target = f"${i}" if nothing else "found"
        lines.append(f"ld.shared.f32 {target}, [at + {offset}];")
        if not nothing:
            lines.append(f"add.f32 ${i}, ${sums + i}, found;")
    return "{" + " ".join(lines) + "}"


def add_up() -> str:
    """Write the assembly that adds up 16 sums of each of 16 threads: thread i returns sum i in its first result, and zeros.

    In each step a thread gives half of its sums to another thread, and takes the other half of that thread's sums.
    """
    lines = [f".reg .b32 lane, bit; .reg .pred upper; .reg .f32 give, keep, got, v<{BLOCK}>; mov.u32 lane, %laneid;"]
    lines += [f"mov.f32 v{i}, ${BLOCK + i};" for i in range(BLOCK)]
    half = BLOCK // 2
    while half:
        lines.append(f"and.b32 bit, lane, {half}; setp.ne.s32 upper, bit, 0;")
        for i in range(half):
            lines.append(f"selp.f32 give, v{i}, v{i + half}, upper; selp.f32 keep, v{i + half}, v{i}, upper;")
            lines.append(f"shfl.sync.bfly.b32 got, give, {half}, 0x1f, 0xffffffff; add.f32 v{i}, keep, got;")
        half //= 2
    lines.append("mov.b32 $0, v0;")
    lines += [f"mov.b32 ${i}, 0;" for i in range(1, BLOCK)]
    return "{" + " ".join(lines) + "}"
