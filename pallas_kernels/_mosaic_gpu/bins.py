"""Keys in shared memory, of which the threads of a cluster choose the best in order: counts of digits, the cut, places.

A program has several warpgroups; what is written here runs in all its threads.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import assembly
from pallas_kernels._mosaic_gpu.threads import MEET_CLUSTER, THREADS

BINS = 128
BLOCKS = 132  # programs that an H100 or H200 holds at once, one on each multiprocessor
FULL = 4  # warpgroups of a multiprocessor, by whose registers or shared memory no more would run
ROOM = 7 * 2**13  # int32 that they have in shared memory
_EACH = range(BINS // 32)  # bins of a lane


class Share(NamedTuple):
    """How a list is shared: programs of its cluster, warpgroups of a program, keys of a program and most keys of a thread."""

    parts: int
    groups: int
    keys: int
    run: int

    @property
    def threads(self) -> int:
        return THREADS * self.groups

    @property
    def size(self) -> int:
        """Keys that a program has room for."""
        return self.run * self.threads

    def part(self) -> jax.Array:
        """Return which program of the cluster this is."""
        return lax.axis_index("part") if self.parts > 1 else jnp.int32(0)

    def group(self) -> jax.Array:
        """Return which warpgroup of the program this is."""
        return lax.axis_index("group") if self.groups > 1 else jnp.int32(0)

    def begin(self) -> jax.Array:
        """Return the first key of this program."""
        return self.part() * self.keys


class Cut(NamedTuple):
    """The cut among the numbers that all programs of a cluster have counted; int32 scalars."""

    bin: jax.Array  # the highest number that enough entries reach
    left: jax.Array  # entries of this number to take
    level: jax.Array  # entries that have this number
    above_before: jax.Array  # entries of earlier programs that have a higher number
    level_before: jax.Array  # and those that have this number
    total: jax.Array  # all entries


def groups_of(programs: int, words: int, most: int) -> int:
    """Choose the warpgroups of each of ``programs``, so few that all run at once, since they wait at different places.

    They are ``most`` at most, unless the ``words`` of shared memory of a program need more.
    """
    few = next((x for x in (4, 2) if x * programs <= FULL * BLOCKS), 1)
    return max(min(few, most), next(x for x in (1, 2, 4) if words <= x * ROOM // FULL))


def meet_all(parts: int) -> None:
    """Wait for all threads of the program, or of all programs of the cluster, and see what they wrote to shared memory."""
    assembly.run(list(MEET_CLUSTER) if parts > 1 else ["barrier.sync 0;"])


def meet_memory(parts: int) -> None:
    """Wait as `meet_all`, and see what all these threads wrote to global memory."""
    assembly.run([f"barrier.cluster.{x}.aligned;" for x in ("arrive", "wait")] if parts > 1 else ["barrier.sync 0;"])


def arrive(parts: int) -> None:
    """Say that this program has read all that it reads of others; the next barrier of the cluster has to be `wait`."""
    assembly.run([MEET_CLUSTER[1]] * (parts > 1))


def wait(parts: int) -> None:
    """Wait until all programs of the cluster have arrived: then this one may end."""
    assembly.run([MEET_CLUSTER[2]] * (parts > 1))


def clear(ref, words: jax.Array | int, threads: int, first: jax.Array | int = 0) -> None:
    """Set ``words`` int32 of shared memory to 0 from ``first`` on, each thread its own."""
    lines = [
        ".reg .pred p; .reg .b32 i, at, x; mov.u32 i, %tid.x; add.s32 at, i, $2; mad.lo.s32 at, at, 4, $0; mov.b32 x, 0;"
    ]
    lines.append(f"CLEAR: setp.lt.s32 p, i, $1; @p st.shared.b32 [at], x; add.s32 i, i, {threads};")
    assembly.run([*lines, f"add.s32 at, at, {4 * threads}; @p bra CLEAR;"], [ref], [jnp.int32(words), jnp.int32(first)])


def cut(ref, wanted: jax.Array, n: Share, first: jax.Array | int = 0, least: int = 0) -> Cut:
    """Find the cut, after all have counted and have met.

    Args:
        ref: int32 [N] in shared memory, of which each program has its counts from ``first`` on.
        wanted: entries to take.
        n: how the list is shared.
        least: the lowest number that is counted.
    """
    base, wanted_, part_, first_ = "$6", "$7", "$8", "$9"
    names = ", ".join(f"{x}{k}" for x in "atbr" for k in _EACH)
    # A lane has four neighbouring bins, and every warp computes the same.
    lines = [
        f".reg .pred p; .reg .b32 {names}, lane, at, there, x, y, n, m, bin; mov.u32 lane, %laneid; shl.b32 bin, lane, 2;"
    ]
    lines += [f"add.s32 at, bin, {first_}; shl.b32 at, at, 2; add.s32 at, at, {base};"]
    lines += [f"mov.b32 {x}{k}, 0;" for x in "tb" for k in _EACH]
    for peer in range(n.parts):
        far = "::cluster" * (n.parts > 1)
        lines.append(f"mapa.shared::cluster.u32 there, at, {peer};" if n.parts > 1 else "mov.b32 there, at;")
        lines.append(f"ld.shared{far}.v4.b32 {{a0, a1, a2, a3}}, [there]; setp.gt.s32 p, {part_}, {peer};")
        lines += [f"add.s32 t{k}, t{k}, a{k}; @p add.s32 b{k}, b{k}, a{k};" for k in _EACH]
    lines += ["mov.b32 r3, t3;", *(f"add.s32 r{k}, t{k}, r{k + 1};" for k in (2, 1, 0)), "mov.b32 x, r0;"]
    for step in (1, 2, 4, 8, 16):
        lines.append(f"shfl.sync.down.b32 y, x, {step}, 31, -1; setp.lt.s32 p, lane, {32 - step}; @p add.s32 x, x, y;")
    lines += ["redux.sync.max.s32 $5, x, -1; sub.s32 x, x, r0; mov.b32 n, 0;"]
    lines += [f"add.s32 r{k}, r{k}, x; setp.ge.s32 p, r{k}, {wanted_}; @p add.s32 n, n, 1;" for k in _EACH]
    lines += [f"redux.sync.add.s32 n, n, -1; sub.s32 n, n, 1; max.s32 n, n, {least}; mov.b32 $0, n;"]
    # Sums over the bins above the cut, and at the cut.
    for result, name, compare in (("m", "t", "gt"), ("$2", "t", "eq"), ("$3", "b", "gt"), ("$4", "b", "eq")):
        lines.append("mov.b32 x, 0;")
        lines += [f"add.s32 y, bin, {k}; setp.{compare}.s32 p, y, n; @p add.s32 x, x, {name}{k};" for k in _EACH]
        lines.append(f"redux.sync.add.s32 {result}, x, -1;")
    lines.append(f"sub.s32 $1, {wanted_}, m;")
    return Cut(*assembly.run(lines, [ref], [wanted, n.part(), jnp.int32(first)], [None] * len(Cut._fields)))


def earlier(word: jax.Array, ref) -> jax.Array:
    """Sum up int32 [128] of the threads before each thread of the program; ``ref`` int32 [32] in shared memory, used once."""
    lines = [".reg .pred p; .reg .b32 lane, warp, at, x, y; mov.u32 lane, %laneid; mov.u32 warp, %tid.x;"]
    lines.append("shr.u32 warp, warp, 5; mov.b32 x, $2;")
    for step in (1, 2, 4, 8, 16):
        lines.append(f"shfl.sync.up.b32 y, x, {step}, 0, -1; setp.ge.s32 p, lane, {step}; @p add.s32 x, x, y;")
    lines.append("shl.b32 at, warp, 2; add.s32 at, at, $1; setp.eq.s32 p, lane, 31; @p st.shared.b32 [at], x;")
    lines.append("barrier.sync 0; shl.b32 at, lane, 2; add.s32 at, at, $1; mov.b32 y, 0; setp.lt.s32 p, lane, warp;")
    lines.append("@p ld.shared.b32 y, [at]; redux.sync.add.s32 y, y, -1; add.s32 y, y, x; sub.s32 $0, y, $2;")
    return assembly.run(lines, [ref], [word], [jnp.int32])[0]


def choose(keys, run: int, low: jax.Array, width: jax.Array | int, found: Cut, ref) -> list[tuple[int, jax.Array, jax.Array]]:
    """Choose keys in order: all above ``low + width - 1``, and from ``low`` on the first ``found.left``; never 0.

    Args:
        keys: int32 in shared memory without signs, ``run`` neighbours for each thread, an even number.
        found: with all keys above, and all from ``low`` on, of earlier programs.
        ref: see `earlier`.

    Returns:
        For every 32 keys of a thread: the number of the first, which are chosen, bits of int32 [128], and the place of the
        first chosen one in the list of all.
    """
    masks = []
    each = 4 if run % 4 == 0 else 2
    names = ", ".join("xyzw"[:each])
    for first in range(0, run, 32):
        lines = [f".reg .pred p, q; .reg .b32 at, {names}; mov.u32 at, %tid.x; mad.lo.s32 at, at, {4 * run}, $2;"]
        lines.append("mov.b32 $0, 0; mov.b32 $1, 0;")
        for i in range(first, min(first + 32, run)):
            if i % each == 0:
                lines.append(f"ld.shared.v{each}.b32 {{{names}}}, [at + {4 * i}];")
            x, bit = "xyzw"[i % each], 1 << (i - first)
            lines.append(
                f"setp.ne.s32 q, {x}, 0; setp.ge.u32 p, {x}, $3; sub.s32 {x}, {x}, $3; setp.ge.and.u32 p, {x}, $4, p;"
            )
            lines.append(f"setp.lt.and.u32 q, {x}, $4, q; @p or.b32 $0, $0, {bit}; @q or.b32 $1, $1, {bit};")
        masks.append(assembly.run(lines, [keys], [low, jnp.int32(width)], [jnp.int32] * 2))
    return places(masks, found, ref)


def places(masks: list[list[jax.Array]], found: Cut, ref) -> list[tuple[int, jax.Array, jax.Array]]:
    """Find where chosen keys go, as `choose`: for each 32 keys masks of those above the cut and of those that may tie."""
    count = ["popc.b32 $0, $1;"]
    numbers = [[assembly.run(count, (), [x], [jnp.int32])[0] for x in pair] for pair in masks]
    word = earlier(sum(above + (level << 16) for above, level in numbers), ref)
    above_before, level_before = found.above_before + (word & 0xFFFF), found.level_before + lax.shift_right_logical(word, 16)
    out = []
    for i, ((above, level), (more, same)) in enumerate(zip(masks, numbers, strict=True)):
        # Of the keys that may tie the first ones are taken: less than all of this thread's is rare.
        lines = [".reg .pred p; .reg .b32 x; mov.b32 $0, $1; LESS: popc.b32 x, $0; setp.gt.s32 p, x, $2;"]
        lines.append(
            "setp.gt.and.s32 p, x, 0, p; @!p bra DONE; bfind.u32 x, $0; shl.b32 x, 1, x; xor.b32 $0, $0, x; bra LESS;"
        )
        kept = assembly.run([*lines, "DONE: mov.b32 x, 0;"], (), [level, found.left - level_before], [jnp.int32])[0]
        out.append((32 * i, above | kept, above_before + jnp.minimum(level_before, found.left)))
        above_before, level_before = above_before + more, level_before + same
    return out


def for_each(bits: jax.Array, refs, numbers, registers: str, begin: str, step: str) -> None:
    """Run instructions for each bit of int32 [128], the lowest first: ``step``, where i is its number, after ``begin``.

    ``$0`` and so on are the addresses of ``refs``, then the bits, then ``numbers``; ``registers`` declares more.
    """
    mask = f"${len(refs)}"
    lines = [f"{registers} .reg .pred p; .reg .b32 left, i, x; mov.b32 left, {mask}; {begin} BIT: setp.eq.s32 p, left, 0;"]
    lines.append(f"@p bra DONE; sub.s32 x, 0, left; and.b32 x, x, left; xor.b32 left, left, x; bfind.u32 i, x; {step}")
    assembly.run([*lines, "bra BIT; DONE: mov.b32 x, 0;"], refs, [bits, *numbers])
