"""Estimates of ParisKV's candidates on Mosaic GPU: a thread has a candidate and looks products up in the lanes of its warp.

A warp has 64 of the channels, and a register for two of them: lane i has the product of the query with the level of code
i % 16, of the second channel from lane 16 on. A look-up is one instruction. Loads of a row by each thread would touch 32 rows
each, so a warp copies its part of the rows together, some rounds ahead, and waits for no other warp.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, assembly, bins
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels.formats.key_codes import LEVELS, SLICE

BYTES = 4  # of a word
LANES = 32
WIDTH = 64  # most channels of a warp, and bytes of their codes
PIECE = 16  # bytes that a thread copies at once, the codes of two slices


def width_of(dim: int) -> int:
    """Return how many channels of ``dim`` a warp has."""
    return min(dim, WIDTH)


def stages_of(groups: int) -> int:
    """Return for how many rounds there is room: 4 in small programs, of which four fit a multiprocessor."""
    return 4 if groups == 1 else 3


def room_for(groups: int, dim: int) -> int:
    """Return the words of codes that are on their way."""
    return stages_of(groups) * width_of(dim) // BYTES * groups * t.THREADS


def _products(query, dim):
    """Multiply this warp's channels of the query with the level of each code: a register for two, float32 [128]."""
    width = width_of(dim)
    count = width // 2
    lines = [".reg .pred p; .reg .b32 x, code, part; .reg .f32 level, y; mov.f32 level, 0f00000000;"]
    lines.append(
        f"mov.u32 code, %laneid; mov.u32 part, %tid.x; shr.u32 part, part, 5; and.b32 part, part, {dim // width - 1};"
    )
    lines.append(f"shr.u32 x, code, 4; mad.lo.s32 x, part, {width}, x; mad.lo.s32 part, x, 4, ${count}; and.b32 x, code, 7;")
    for i, level in enumerate(LEVELS):
        lines.append(f"setp.eq.s32 p, x, {i}; @p mov.f32 level, 0f{np.float32(level).view(np.uint32):08X};")
    lines.append("and.b32 x, code, 8; setp.eq.s32 p, x, 0; neg.f32 y, level; @p mov.f32 level, y;")
    lines += [f"ld.shared.f32 ${i}, [part + {8 * i}];" for i in range(count)]
    lines += [f"mul.f32 ${i}, level, ${i};" for i in range(count)]
    return assembly.run(lines, [query], (), [jnp.float32] * count)


def _copy(rows_ref, codes, row, stage):
    """Begin to copy this warp's part of each ``row`` int32 [128], if not negative, to a stage of shared memory.

    Pieces of 128 bytes change places, so that neighbouring rows have a piece in different banks.
    """
    dim = rows_ref.shape[1]
    width = width_of(dim)
    pieces = width // PIECE
    lines = [".reg .pred p; .reg .b64 base, from; .reg .b32 lane, to, x, y; mov.u32 lane, %laneid; mov.u32 to, %tid.x;"]
    lines.append(f"shr.u32 x, to, 5; and.b32 x, x, {dim // width - 1}; and.b32 y, lane, {pieces - 1};")
    lines.append(f"mad.wide.s32 base, x, {width}, $0; mad.wide.s32 base, y, {PIECE}, base; sub.s32 to, to, lane;")
    lines.append(
        f"mul.lo.s32 to, to, {width}; mad.lo.s32 to, lane, {PIECE}, to; shr.u32 lane, lane, {pieces.bit_length() - 1};"
    )
    for i in range(pieces):
        lines.append(f"add.s32 x, lane, {i * LANES // pieces}; shfl.sync.idx.b32 x, $2, x, 31, -1; setp.ge.s32 p, x, 0;")
        lines.append(f"mad.wide.s32 from, x, {dim}, base; shr.u32 x, to, 3; and.b32 x, x, {7 * PIECE}; xor.b32 x, x, to;")
        lines.append(f"add.s32 x, x, $3; add.s32 x, x, $1; @p cp.async.cg.shared.global [x], [from], {PIECE};")
        lines.append(f"add.s32 to, to, {LANES * PIECE};")
    assembly.run([*lines, "cp.async.commit_group;"], [rows_ref, codes], [row, stage])


def _estimate(products, codes, at):
    """Sum up weight times (levels . query) over the channels of `_products`: float32 [128].

    ``at`` int32 [128] is where the codes of a thread's candidate are in shared memory. Each 32 channels have their own sum.
    """
    channels = 2 * len(products)
    base, place = "$1", f"${2 + len(products)}"
    lines = [".reg .b32 at, x, even, odd, a, b, c, d; .reg .f32 v, sum, part;"]
    for first in range(0, channels, LANES):
        lines.append("mov.f32 part, 0f00000000;")
        for begin in range(first, first + LANES, 2 * SLICE):
            lines.append(f"xor.b32 at, {place}, {begin}; add.s32 at, at, {base}; ld.shared.v4.b32 {{a, b, c, d}}, [at];")
            for channel, levels, weight in ((begin, "a", "b"), (begin + SLICE, "c", "d")):
                # Of the codes in a byte the second is looked up from lane 16 on.
                lines.append(f"and.b32 even, {levels}, 0x0f0f0f0f; shr.u32 odd, {levels}, 4;")
                lines.append("and.b32 odd, odd, 0x0f0f0f0f; or.b32 odd, odd, 0x10101010;")
                for i in range(SLICE):
                    lines.append(f"shr.u32 at, {('even', 'odd')[i % 2]}, {i // 2 * 8}; mov.b32 x, ${2 + (channel + i) // 2};")
                    lines.append("shfl.sync.idx.b32 x, x, at, 31, -1; mov.b32 v, x;")
                    lines.append("add.f32 sum, sum, v;" if i else "mov.f32 sum, v;")
                lines.append(f"shl.b32 x, {weight}, 16; mov.b32 v, x; fma.rn.f32 part, sum, v, part;")
        lines.append("add.f32 $0, $0, part;" if first else "mov.f32 $0, part;")
    return assembly.run(lines, [codes], [*products, at], [jnp.float32])[0]


def estimate(n, query, slots_ref, rows_ref, sums, codes, live, stored):
    """Write the parts of the estimates of this program's first ``live`` candidates to shared memory, and meet.

    Args:
        n: how a list is shared.
        query: shared memory float32 [128].
        slots_ref: int32 [L, C], the candidates.
        rows_ref: uint8 [L * S, D], the codes.
        sums: shared memory int32 [Q, N], bits of float32: a part for every `width_of` channels.
        codes: shared memory int32 [`room_for`].
        live: int32.
        stored: slots S of a list.
    """
    dim, candidates, line, entries = rows_ref.shape[1], slots_ref.shape[1], lax.axis_index("x"), n.begin()
    width, products = width_of(dim), _products(query, dim)
    parts, stage, stages = dim // width, n.threads * width, stages_of(n.groups)
    step, thread = n.threads // parts, n.group() * t.THREADS + arrays.counted(t.THREADS)
    warp, mine = lax.shift_right_logical(thread, 5), thread * width
    place = lax.div(warp, parts) * LANES + (thread & (LANES - 1))
    mine = mine ^ ((lax.shift_right_logical(mine, 7) & 7) * PIECE)

    def slots(number):
        at = number * step + place
        inside = (at < n.keys) & (entries + at < candidates)  # so that the load need not wait for the number of candidates
        return arrays.load(slots_ref, jnp.where(inside, line * candidates + entries + at, -1), -1)

    def copy(number, slot):
        row = jnp.where(number * step + place < live, line * stored + jnp.clip(slot, 0, stored - 1), -1)
        _copy(rows_ref, codes, row, lax.rem(number, stages) * stage)

    def add(number, slot):
        assembly.run([f"cp.async.wait_group {stages - 1}; bar.warp.sync -1;"])
        estimate = _estimate(products, codes, lax.rem(number, stages) * stage + mine)
        assembly.run(["bar.warp.sync -1;"])  # all lanes have read the rows that others follow
        copy(number + stages, slot)
        ahead = slots(number + stages + 1)
        at = (warp & (parts - 1)) * n.size + number * step + place
        arrays.store_shared(sums, at, lax.bitcast_convert_type(estimate, jnp.int32))
        return ahead

    *begins, begin = [slots(jnp.int32(i)) for i in range(stages + 1)]
    for i, slot in enumerate(begins):
        copy(jnp.int32(i), slot)
    lax.fori_loop(0, lax.div(live + step - 1, step), add, begin)
    bins.meet_all(1)
