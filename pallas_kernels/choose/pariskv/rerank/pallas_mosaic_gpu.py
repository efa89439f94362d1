"""Estimates of the candidates, the best of them and the list, in one kernel for Mosaic GPU: a cluster of programs has a list.

1. Each warp has a quarter of the channels, 32, and a register for each channel: lane i has the product of the query with the
   level of code i % 16. A thread has a candidate, and looks its products up in other lanes, one instruction a channel.
2. The best are found digit by digit: the keys are counted by their highest seven bits, those at the cut by the next seven.
3. Each thread writes its candidates in order; the programs share out the rest of the list.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, bins
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import mgpu, plgpu
from pallas_kernels._triton.kth_search import NEVER, order_key
from pallas_kernels.formats.key_codes import LEVEL, LEVELS, SLICE

LANES = 32  # channels of a warp
WORDS = LANES // 4  # of their codes: of each slice one of levels, and one with its weight
TOGETHER = 2  # candidates of a thread whose codes are on their way together
DIGIT = 7  # bits of a key that are counted together
MANY = 2**30  # more than any list has
ROOM = 3 * 2**14  # parts of estimates that a program has room for in shared memory
BLOCKS = 132  # programs that an H100 or H200 holds at once, one on each multiprocessor
LEAST = float(jnp.finfo(jnp.float32).min)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a program is for: candidates, slots and channels; programs of a list, their warpgroups, candidates of a thread."""

    heads: int
    candidates: int
    slots: int
    dim: int
    scale: float
    parts: int
    warpgroups: int
    run: int

    @property
    def threads(self) -> int:
        return t.THREADS * self.warpgroups

    @property
    def size(self) -> int:
        """Candidates of a program."""
        return self.run * self.threads

    @property
    def quarters(self) -> int:
        """Warps that share a candidate."""
        return self.dim // LANES


def _looked_up(query_ref, line, n):
    """Multiply 32 channels of the query with the level of each code: a register for each, float32 [128]."""
    own = t.own(1)
    one = plgpu.ShapeDtypeStruct((t.THREADS,), jnp.float32, layout=own)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=(one,) * LANES)
    def run(ctx, query, line):
        place = t.at(t.address(query), t.element(t.number(t.value(line)), n.dim, t.number(0)), 4)
        out = LANES
        lines = [".reg .pred p; .reg .b64 at; .reg .b32 x, code; .reg .f32 level, y, a, b, c, d;"]
        lines.append(f"mov.u32 x, %tid.x; shr.u32 x, x, 5; and.b32 x, x, {n.quarters - 1}; mul.wide.u32 at, x, {LANES * 4};")
        lines.append(f"add.s64 at, at, ${out}; mov.u32 code, %laneid; and.b32 x, code, 7; mov.f32 level, 0f00000000;")
        for i, level in enumerate(LEVELS):
            lines.append(f"setp.eq.s32 p, x, {i}; @p mov.f32 level, {_hex(level)};")
        lines.append("and.b32 x, code, 8; setp.eq.s32 p, x, 0; neg.f32 y, level; @p mov.f32 level, y;")
        for i in range(0, LANES, 4):
            lines.append(f"ld.global.nc.v4.f32 {{a, b, c, d}}, [at + {4 * i}];")
            lines += [f"mul.f32 ${i + j}, level, {x};" for j, x in enumerate("abcd")]
        found = mgpu.utils.inline_ptx("{" + " ".join(lines) + "}", place, result_types=(_f32(),) * LANES, has_side_effects=True)
        return tuple(t.made_of([t.number(x, None)], floats=True) for x in found)

    return run(query_ref, line)


def _f32():
    return t.ir.F32Type.get()


def _hex(x):
    return f"0f{jnp.float32(x).view(jnp.uint32).item():08X}"


def _rows(rows_ref, row, n):
    """Load this warp's part of the codes of ``row`` int32 [N], nothing where it is negative: 8 words, int32 [N] each."""
    own = t.own(row.shape[0] // t.THREADS)
    one = plgpu.ShapeDtypeStruct(row.shape, jnp.int32, layout=own)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), own), return_type=(one,) * WORDS)
    def run(ctx, rows, row):
        names = [f"${i}" for i in range(WORDS)]
        text = "{ .reg .pred p; .reg .b64 at; .reg .b32 x; " + " ".join(f"mov.b32 {x}, 0;" for x in names)
        text += f" mov.u32 x, %tid.x; shr.u32 x, x, 5; and.b32 x, x, {n.quarters - 1}; mul.wide.u32 at, x, {LANES}; "
        text += f"add.s64 at, at, ${WORDS}; mad.wide.s32 at, ${WORDS + 1}, {n.dim}, at; setp.ge.s32 p, ${WORDS + 1}, 0; "
        for i in (0, 4):
            text += f"@p ld.global.nc.L2::128B.v4.b32 {{{', '.join(names[i : i + 4])}}}, [at + {4 * i}]; "
        base, found = t.address(rows), []
        for x in t.numbers_of(row):
            words = mgpu.utils.inline_ptx(text + "}", base, t.value(x), result_types=(t.i32(),) * WORDS, has_side_effects=True)
            found.append([t.number(x) for x in words])
        return tuple(t.made_of(list(x)) for x in zip(*found, strict=True))

    return run(rows_ref, row)


def _estimate(table, words):
    """Sum up weight times (levels . query) over 32 channels: ``table`` of `_looked_up`, ``words`` of `_rows`; float32 [N]."""
    own, one = t.own(words[0].shape[0] // t.THREADS), t.own(1)
    result = plgpu.ShapeDtypeStruct(words[0].shape, jnp.float32, layout=own)

    @plgpu.inline_mgpu(arg_types=((one,) * LANES, (own,) * WORDS), return_type=result)
    def run(ctx, table, words):
        table = [t.value(*t.numbers_of(x, floats=True)) for x in table]
        lines = [".reg .b32 at, x; .reg .f32 v, sum, total; mov.f32 total, 0f00000000;"]
        for i in range(LANES):
            levels, weight = (f"${1 + LANES + i // SLICE * 2 + j}" for j in (0, 1))
            number = i % SLICE
            lines.append(f"shr.u32 at, {levels}, {4 * number};" if number else f"mov.b32 at, {levels};")
            lines.append(f"mov.b32 x, ${1 + i}; shfl.sync.idx.b32 x, x, at, 31, -1; mov.b32 v, x;")
            lines.append("add.f32 sum, sum, v;" if number else "mov.f32 sum, v;")
            if number == SLICE - 1:
                lines.append(f"shl.b32 x, {weight}, 16; mov.b32 v, x; fma.rn.f32 total, sum, v, total;")
        text, found = "{" + " ".join(lines) + " mov.f32 $0, total; }", []
        for mine in zip(*map(t.numbers_of, words), strict=True):
            x = mgpu.utils.inline_ptx(
                text, *table, *map(t.value, mine), result_types=_f32(), has_side_effects=True, convergent=True
            )
            found.append(t.number(x, None))
        return t.made_of(found, floats=True)

    return run(tuple(table), tuple(words))


def _count(counted, keys, low, width, shift, first, n):
    """Count the keys from ``low`` to ``low + width``, all without signs, by their bits from ``shift`` on."""
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 2, *[splat] * 4))
    def run(ctx, counted, keys, low, width, shift, first):
        place = t.number(t.address(counted)) + t.number(t.value(first)) * 4
        text = "{ .reg .pred p, q; .reg .b32 at, x, i; mov.u32 at, %tid.x; shl.b32 at, at, 2; add.s32 at, at, $1; mov.b32 i, 0; "
        text += "KEY: ld.shared.b32 x, [at]; setp.ne.s32 q, x, 0; sub.s32 x, x, $2; setp.lt.and.u32 p, x, $3, q; "
        text += "shr.u32 x, x, $4; shl.b32 x, x, 2; add.s32 x, x, $0; @p red.shared.add.u32 [x], 1; "
        text += f"add.s32 at, at, {4 * n.threads}; add.s32 i, i, 1; setp.lt.s32 p, i, {n.run}; @p bra KEY; }}"
        operands = t.value(place), t.address(keys), *map(t.value, (low, width, shift))
        mgpu.utils.inline_ptx(text, *operands, has_side_effects=True)

    run(counted, keys, low, width, shift, first)


def _kind(key, low, width):
    """Write instructions: p, the key is above those that may tie; q, it is one of these. ``key`` becomes its distance."""
    text = f"setp.ne.s32 q, {key}, 0; setp.ge.u32 p, {key}, {low}; sub.s32 {key}, {key}, {low}; "
    return text + f"setp.ge.and.u32 p, {key}, {width}, p; setp.lt.and.u32 q, {key}, {width}, q; "


def _flags(keys, low, width, n):
    """Count this thread's keys above those that may tie, and these, in the halves of a word: int32 [128]."""
    own, splat = t.own(1), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), splat, splat), return_type=plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=own)
    )
    def run(ctx, keys, low, width):
        text = f"{{ .reg .pred p, q; .reg .b32 at, x, i, sum; mov.u32 at, %tid.x; mad.lo.s32 at, at, {4 * n.run}, $1; mov.b32 sum, 0; "
        text += f"mov.b32 i, 0; FLAG: ld.shared.b32 x, [at]; {_kind('x', '$2', '$3')} "
        text += "@p add.s32 sum, sum, 1; @q add.s32 sum, sum, 65536; "
        text += f"add.s32 at, at, 4; add.s32 i, i, 1; setp.lt.s32 p, i, {n.run}; @p bra FLAG; mov.b32 $0, sum; }}"
        operands = t.address(keys), *map(t.value, (low, width))
        return t.made_of([t.number(mgpu.utils.inline_ptx(text, *operands, result_types=t.i32(), has_side_effects=True))])

    return run(keys, low, width)


def _list(list_ref, mask_ref, slots_ref, keys, at, entry, low, width, left, above, level, n):
    """Write this thread's best candidates: those above, and the first ``left`` of those that may tie.

    Args:
        list_ref: int32 [L, K].
        mask_ref: bool [L, K].
        slots_ref: int32 [L, C].
        keys: of the program's candidates, in shared memory.
        at: int32, where the best begin in the list.
        entry: int32, the program's first candidate.
        low: the least key that may tie.
        width: how many keys these are.
        left: int32.
        above: int32 [128], candidates above before this thread's.
        level: int32 [128], candidates that may tie before them.
    """
    own, splat = t.own(1), plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, *[splat] * 5, own, own))
    def run(ctx, list_ref, mask_ref, slots_ref, keys, at, entry, low, width, left, above, level):
        at, entry = (t.number(t.value(x)) for x in (at, entry))
        places = t.at(t.address(list_ref), at, 4), t.at(t.address(mask_ref), at, 1), t.at(t.address(slots_ref), entry, 4)
        text = "{ .reg .pred p, q, r; .reg .b64 to, mask, from; .reg .b32 at, x, i, above, level, slot; mov.u32 at, %tid.x; "
        text += f"mul.wide.u32 from, at, {4 * n.run}; add.s64 from, from, $2; mad.lo.s32 at, at, {4 * n.run}, $3; mov.b32 i, 0; "
        text += f"mov.b32 above, $7; mov.b32 level, $8; KEY: ld.shared.b32 x, [at]; {_kind('x', '$4', '$5')} "
        text += "setp.lt.and.s32 r, level, $6, q; or.pred r, r, p; min.s32 x, level, $6; add.s32 x, x, above; "
        text += "@p add.s32 above, above, 1; @q add.s32 level, level, 1; mad.wide.s32 to, x, 4, $0; mad.wide.s32 mask, x, 1, $1; "
        text += "@r ld.global.b32 slot, [from]; @r st.global.b32 [to], slot; mov.b32 x, 1; @r st.global.u8 [mask], x; "
        text += "add.s64 from, from, 4; "
        text += f"add.s32 at, at, 4; add.s32 i, i, 1; setp.lt.s32 p, i, {n.run}; @p bra KEY; }}"
        operands = [*places, t.address(keys), *map(t.value, (low, width, left))]
        operands += [t.value(*t.numbers_of(x)) for x in (above, level)]
        mgpu.utils.inline_ptx(text, *operands, has_side_effects=True)

    run(list_ref, mask_ref, slots_ref, keys, at, entry, low, width, left, above, level)


def _estimates(n, query_ref, slots_ref, rows_ref, sums, line, begin, live):
    """Write the parts of the estimates of this program's first ``live`` candidates to ``sums`` float32 [Q, N]."""
    team, table = lax.axis_index("warpgroup"), _looked_up(query_ref, line, n)
    entry = arrays.counted(t.THREADS * TOGETHER)
    warp = team * 4 + (lax.shift_right_logical(entry, 5) & 3)
    step = n.threads // n.quarters * TOGETHER  # candidates of all warps
    place = lax.div(warp, n.quarters) * (LANES * TOGETHER) + lax.shift_right_logical(entry, 7) * LANES + (entry & (LANES - 1))

    def slots(number):
        at = number * step + place
        return arrays.load(slots_ref, jnp.where(at < live, line * n.candidates + begin + at, -1), -1)

    def rows(slot):
        return _rows(rows_ref, jnp.where(slot >= 0, line * n.slots + jnp.minimum(slot, n.slots - 1), -1), n)

    def add(number, ahead):
        words, slot = ahead
        ahead = rows(slot), slots(number + 2)
        at = (warp & (n.quarters - 1)) * n.size + number * step + place
        arrays.store_shared(sums, at, _estimate(table, words))
        return ahead

    lax.fori_loop(0, lax.div(live + step - 1, step), add, (rows(slots(jnp.int32(0))), slots(jnp.int32(1))))


def _joined(n, sums, number, live):
    """Add up the parts of the estimates of candidates ``number`` int32 [N]: float32 [N], -inf from ``live`` on."""
    total = functools.reduce(jnp.add, [arrays.load_shared(sums, number + i * n.size) for i in range(n.quarters)])
    total = total * (n.scale * LEVEL)
    total = jnp.where(total == 0, 0.0, total)
    total = jnp.where(total < LEAST, LEAST, total)  # NaN stays, and is never chosen
    return jnp.where(number < live, total, -jnp.inf)


def _begin(n, count_ref):
    """Return the line, the program's first candidate, and how many candidates it has."""
    line, part = lax.axis_index("x"), lax.axis_index("part") if n.parts > 1 else jnp.int32(0)
    begin = part * n.size
    return line, part, begin, jnp.clip(jnp.minimum(arrays.scalar(count_ref, line), n.candidates) - begin, 0, n.size)


def _numbers(n, i):
    """Return the candidates that the threads of a warpgroup work on in round ``i``."""
    return i * n.threads + lax.axis_index("warpgroup") * t.THREADS + arrays.counted(t.THREADS)


def _body_estimates(query_ref, slots_ref, count_ref, rows_ref, out_ref, sums, *, n):
    # query [L, D]; slots [L, C]; count [L]; rows [L * S, D]; out [L, C]. In shared memory: parts of the estimates.
    line, _, begin, live = _begin(n, count_ref)
    _estimates(n, query_ref, slots_ref, rows_ref, sums, line, begin, live)
    bins.meet_all(1)

    def write(i, carry):
        number = _numbers(n, i)
        at = begin + number
        arrays.store(out_ref, jnp.where(at < n.candidates, line * n.candidates + at, -1), _joined(n, sums, number, live))
        return carry

    lax.fori_loop(0, n.run, write, 0)


def _search(n, keys, counted, wanted, part):
    """Find the best ``wanted`` keys, digit by digit, of those that are not 0.

    Returns:
        The least key that they may have, how many keys from there on count as equal, and what `bins.Cut` has of the last digit,
        but of all keys above and all that are counted.
    """

    def unsettled(state):
        shift, _, _, _, cut = state
        return (shift >= 0) & (cut[2] > cut[1])

    def narrow(state):
        shift, low, width, first, (_, left, _, above, _, total) = state
        _count(counted, keys, low, width, shift, first, n)
        bins.meet_all(n.parts)
        cut = bins.cut(counted, left, part, n.parts, first)
        bins.clear(counted, bins.BINS, n.threads, bins.BINS - first)  # all programs have read what is there
        bins.meet_all(1)
        low, width = low + lax.shift_left(cut.bin, shift), lax.shift_left(jnp.int32(1), shift)
        cut = cut._replace(above_before=above + cut.above_before, total=jnp.maximum(total, cut.total))
        return jnp.where(shift > 0, jnp.maximum(shift - DIGIT, 0), -1), low, width, bins.BINS - first, tuple(cut)

    zero = jnp.int32(0)
    state = jnp.int32(32 - DIGIT), zero, jnp.int32(-1), zero, (zero, wanted, jnp.int32(MANY), zero, zero, zero)
    _, low, width, _, cut = lax.while_loop(unsettled, narrow, state)
    return low, width, bins.Cut(*cut)


def _body(
    query_ref, slots_ref, count_ref, rows_ref, position_ref, cursor_ref, stop_ref, limits_ref, list_ref, mask_ref, sums, keys,
    counted, totals, *, n, regions,
):  # fmt: skip
    # query [L, D]; slots [L, C]; count [L]; rows [L * S, D]; position [L, S]; cursor, stop [B]; limits: budget and enough; list
    # and mask [L, size]. In shared memory: parts of the estimates, keys, two counts of digits, sums of warps.
    line, part, begin, live = _begin(n, count_ref)
    bins.clear(counted, 2 * bins.BINS, n.threads)
    cursor, stop = (arrays.scalar(ref, lax.div(line, n.heads)) for ref in (cursor_ref, stop_ref))
    dense = (cursor < arrays.scalar(limits_ref, line * 0 + 1)) | (stop <= regions.sinks)
    wanted = jnp.where(dense, 0, jnp.clip(arrays.scalar(limits_ref, line * 0), 0, regions.best))
    _estimates(n, query_ref, slots_ref, rows_ref, sums, line, begin, live)
    bins.meet_all(1)

    def order(i, carry):
        number = _numbers(n, i)
        arrays.store_shared(keys, number, order_key(_joined(n, sums, number, live)) ^ NEVER)
        return carry

    lax.fori_loop(0, n.run, order, 0)
    bins.meet_all(n.parts)
    low, width, cut = _search(n, keys, counted, wanted, part)
    word = bins.earlier(_flags(keys, low, width, n), totals, 4 * n.warpgroups)
    above, level = cut.above_before + (word & 0xFFFF), cut.level_before + lax.shift_right_logical(word, 16)
    at, entry = line * regions.size + regions.sinks, line * n.candidates + begin
    _list(list_ref, mask_ref, slots_ref, keys, at, entry, low, width, cut.left, above, level, n)

    # The chosen stand behind the sinks. All programs share out the rest: sinks, the tail, entries that nothing fills.
    share = arrays.size_of(-(-regions.size // (n.parts * n.warpgroups)))
    at = (part * n.warpgroups + lax.axis_index("warpgroup")) * share + arrays.counted(share)
    behind = at - (regions.sinks + regions.best)
    slot = jnp.where(dense, at, jnp.where(behind >= 0, stop + behind, jnp.minimum(at, regions.sinks)))
    listed = (dense | (at < regions.sinks) | ((behind >= 0) & (behind < regions.tail))) & (slot < jnp.minimum(cursor, n.slots))
    rest = (at < regions.size) & ((at < regions.sinks) | (at >= regions.sinks + jnp.minimum(wanted, cut.total)))
    listed, where, slot = listed & rest, jnp.where(rest, line * regions.size + at, -1), jnp.clip(slot, 0, n.slots - 1)
    held = arrays.load(position_ref, jnp.where(listed, line * n.slots + slot, -1), -1) >= 0
    arrays.store(list_ref, where, slot)
    arrays.store(mask_ref, where, held.astype(jnp.int32))
    if n.parts > 1:
        bins.meet_all(n.parts)  # no program ends before all have read its counts


def sizes_for(slots, rows, scale, parts=None, warpgroups=None):
    """Choose the programs of a list and their warpgroups: as many as the multiprocessors hold at once."""
    (batch, heads, candidates), (stored, dim) = slots.shape, rows.shape[2:]
    if parts is None:
        parts = next((n for n in (8, 4, 2) if n * batch * heads <= BLOCKS and candidates >= n * 256), 1)
        parts = max(parts, next((n for n in (1, 2, 4) if candidates * dim <= n * LANES * ROOM), 8))
    if warpgroups is None:
        warpgroups = 2 if candidates <= parts * 1024 else 4
    run = -(-candidates // (parts * warpgroups * t.THREADS * 2)) * 2
    return Sizes(
        heads=heads, candidates=candidates, slots=stored, dim=dim, scale=scale, parts=parts, warpgroups=warpgroups, run=run
    )


def _launch(body, n, out, *operands, more=()):
    """Run a kernel of a list's programs."""
    return arrays.program(
        functools.partial(body, n=n),
        out,
        grid=(operands[0].shape[0],),
        parts=n.parts,
        warpgroups=n.warpgroups,
        scratch=[plgpu.SMEM((n.quarters * n.size,), jnp.float32), *(plgpu.SMEM((x,), jnp.int32) for x in more)],
    )(*operands)


def _flat(query, slots, count, rows):
    """Reshape operands: one axis of lists."""
    lists = slots.shape[0] * slots.shape[1]
    return query.reshape(lists, -1), slots.reshape(lists, -1), count.reshape(-1), rows.reshape(-1, rows.shape[3])


def estimates(query, slots, count, rows, *, scale):
    """Estimate the product of the query with each candidate."""
    n, operands = sizes_for(slots, rows, scale), _flat(query, slots, count, rows)
    (out,) = _launch(_body_estimates, n, [jax.ShapeDtypeStruct(operands[1].shape, jnp.float32)], *operands)
    return out.reshape(slots.shape)


def rerank(query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale, **choice):
    """List the best candidates by estimate between the first and the last slots."""
    n, operands = sizes_for(slots, rows, scale, **choice), _flat(query, slots, count, rows)
    lists, limits = len(operands[0]), jnp.stack([jnp.asarray(x, jnp.int32) for x in (budget, enough)])
    out = [jax.ShapeDtypeStruct((lists, regions.size), dtype) for dtype in (jnp.int32, jnp.bool_)]
    body = functools.partial(_body, regions=regions)
    made = _launch(body, n, out, *operands, position.reshape(lists, -1), cursor, stop, limits, more=(n.size, 2 * bins.BINS, 32))
    return tuple(x.reshape(*slots.shape[:2], -1) for x in made)


def check(query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    check_estimates(query, slots, count, rows, scale=scale)
    if not regions.size <= position.shape[2]:
        raise NotImplementedError(f"got {regions}, expected a list of at most {position.shape[2]}")


def check_estimates(query, slots, count, rows, *, scale):
    """Raise ``NotImplementedError`` for sizes that the kernel of estimates does not take."""
    arrays.check_hopper()
    dim = query.shape[-1]
    if dim not in (32, 64, 128, 256) or not slots.size or max(rows.size // dim, slots.size) >= 2**31:
        raise NotImplementedError(f"got rows {rows.shape} and slots {slots.shape}, expected head_dim 32 to 256")
    if slots.shape[2] * dim > 8 * LANES * ROOM:
        raise NotImplementedError(f"got {slots.shape[2]} candidates, expected at most {8 * LANES * ROOM // dim}")
