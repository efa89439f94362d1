"""The vote tables of a list in shared memory, where 16 lookups of a key take 16 instructions for addresses and 16 loads.

One piece of assembly (see `pallas_kernels._triton.assembly`) declares the array and gives its address; the other pieces take
this address as an operand, so that none can run before the one it needs.
"""

import jax.numpy as jnp
from jax import Array

from pallas_kernels._triton.assembly import assembly
from pallas_kernels.formats.key_codes import CLUSTERS

COUNTS = 128  # numbers 0 to 127 are counted
_WORD = 4  # bytes per word
_PACK = 16  # bytes of a row per piece of assembly
_STORE = "{.reg .b32 at; add.s32 at, $1, $2; st.shared.b32 [at], $3; mov.b32 $0, $1;}"  # word $3 at byte $2; gives $1
_ADD = "{.reg .b32 at; shl.b32 at, $2, 2; add.s32 at, at, $1; red.shared.add.u32 [at + %d], 1; mov.b32 $0, $1;}"


class Table:
    """The vote tables of one list, and counters of numbers; in shared memory, or plain arrays where interpreted.

    Args:
        ref: int32 [N * 64], a byte of votes for each cluster of each slice.
        threads: number of threads of the program.
        interpret: compute without assembly.
    """

    def __init__(self, ref, threads: int, interpret: bool):
        self._ref, self._interpret = ref, interpret
        self._slices = ref.shape[0] * _WORD // CLUSTERS
        if interpret:
            return
        lane = jnp.arange(threads, dtype=jnp.int32)
        size, nothing = ref.shape[0], jnp.zeros_like(lane)
        declare = f"{{.shared .align 256 .b8 table[{(size + COUNTS) * _WORD}]; mov.b32 $0, table; add.s32 $0, $0, $1;}}"
        base = assembly(declare, [nothing])
        # Copy the tables, and clear the counters behind them; then wait for all threads.
        for begin, end in ((0, size), (size, size + COUNTS)):
            for first in range(begin, end, threads):
                at = jnp.minimum(first + lane, end - 1)
                base = assembly(_STORE, [base, at * _WORD, ref[at] if begin == 0 else nothing])
        self._base = assembly("{bar.sync 0; mov.b32 $0, $1;}", [base])

    def votes(self, ids: Array) -> Array:
        """Sum the votes of each row of ids uint8 [T, N]: int32 [T]; a thread has one row."""
        if self._interpret:
            index = jnp.arange(self._slices, dtype=jnp.int32)[None, :] * CLUSTERS + ids.astype(jnp.int32)
            found = self._ref[index // _WORD] >> (index % _WORD * 8)
            return jnp.sum(found & 0xFF, axis=1, dtype=jnp.int32)
        slices = jnp.arange(self._slices, dtype=jnp.int32)[None, :]
        start = self._base[:, None] + slices * CLUSTERS
        pack = min(self._slices, _PACK)
        words = pack // _WORD
        # Tables of 256 bytes begin at multiples of 256, so a byte of ids replaces the lowest byte of its table's address. All
        # votes are added to the first number of a pack; all other numbers are zero.
        lines = [".reg .b32 at, found;", *(f"mov.b32 ${i}, 0;" for i in range(pack))]
        for i in range(pack):
            lines.append(f"prmt.b32 at, ${pack + i // _WORD}, ${pack + words}, {0x7650 + i % _WORD:#x};")
            lines.append(f"ld.shared.u8 found, [at + {i * CLUSTERS}]; add.s32 $0, $0, found;")
        return jnp.sum(assembly("{" + " ".join(lines) + "}", [ids, start], pack), axis=1, dtype=jnp.int32)

    def nothing(self) -> Array:
        """Return the state that `count` begins with."""
        return jnp.zeros((COUNTS,), jnp.int32) if self._interpret else self._base

    def count(self, numbers: Array, counted: Array) -> Array:
        """Count ``numbers`` int32 [T] below `COUNTS`, and return ``counted`` for the next call."""
        if self._interpret:
            hit = numbers[:, None] == jnp.arange(COUNTS, dtype=jnp.int32)[None, :]
            return counted + jnp.sum(hit, axis=0, dtype=jnp.int32)
        return assembly(_ADD % (self._ref.shape[0] * _WORD), [counted, numbers])

    def counts(self, counted: Array) -> Array:
        """Return how often each number was counted: int32 [COUNTS]."""
        if self._interpret:
            return counted
        # Every thread has the same address in `counted`; a barrier waits until all have counted.
        base = jnp.full((COUNTS,), jnp.max(counted), jnp.int32)
        at = (self._ref.shape[0] + jnp.arange(COUNTS, dtype=jnp.int32)) * _WORD
        return assembly("{.reg .b32 at; bar.sync 0; add.s32 at, $1, $2; ld.shared.b32 $0, [at];}", [base, at])


def add_where_greater(sums: Array, one: Array, other: Array, more: Array, interpret: bool) -> Array:
    """Add ``more`` float32 to ``sums`` float32 where ``one`` int32 > ``other`` int32; all have one shape.

    It takes a comparison and a predicated addition. Compilers would use a selection as well, which waits for the same unit
    as the comparison.
    """
    if interpret:
        return jnp.where(one > other, sums + more, sums)
    return assembly(
        "{.reg .pred greater; setp.gt.s32 greater, $2, $3; mov.f32 $0, $1; @greater add.f32 $0, $0, $4;}",
        [sums, one, other, more],
        result=jnp.float32,
    )


def words(numbers: Array, interpret: bool) -> list[Array]:
    """Join every four neighbouring bytes of uint8 [T, 4 * W] to a word: W arrays int32 [T]."""
    column = jnp.arange(numbers.shape[1], dtype=jnp.int32)[None, :]
    if interpret:
        placed = numbers.astype(jnp.int32) << (column % _WORD * 8)
    else:
        placed = assembly("{mov.b32 $0, $4; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;}", [numbers], _WORD)
    groups = range(numbers.shape[1] // _WORD)
    return [jnp.sum(jnp.where(column // _WORD == i, placed, 0), axis=1, dtype=jnp.int32) for i in groups]
