"""The steps of `decode.attend` that Pallas has no operations for: functions that are made for a kernel's sizes.

`loader` is of the warpgroup that copies, `query_loader` and `merger` of the one that multiplies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import arith, ir, mgpu, plgpu, vector
from pallas_kernels.numerics import LOG2_E

ROWS = 64  # of the product: query heads of a KV head, times queries
BLOCK = 64  # entries of a block, of 128 channels or more: the least that `wgmma` sums over
COPIERS = 2  # warpgroups that copy, a half of each block: what a thread does for a row limits them
RING = 96  # KiB of keys in shared memory, and as many of values
UNSEEN = 2**31 - 1  # the position of a slot that no query sees


@dataclasses.dataclass(frozen=True)
class Lists:
    """Which rows of the cache a program reads, in blocks of entries.

    Attributes:
        operands: arrays.
        entries: of refs of ``operands``, row and KV head to the number of entries, and scalars that the next two get.
        row: inside of `plgpu.inline_mgpu`, of scalars, an entry and what was loaded for it to its row of the cache, or -1.
        load: inside, of refs, scalars and an entry to int32 numbers, loaded two blocks ahead; a bias is the last one.
        loads: how many.
        biased: whether there is a bias, a float32 that is added to the logits.
        block_number: of refs, row, KV head, number and size of blocks to how many are read, and a function from 0, 1, ... to
            these; None: all are.
    """

    operands: tuple[jax.Array, ...]
    entries: Callable[..., tuple[Any, tuple[Any, ...]]]
    row: Callable[..., Any]
    load: Callable[..., list[Any]] | None = None
    loads: int = 0
    biased: bool = False
    block_number: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a kernel: KV heads, rows of a query, channels, slots, programs in a cluster, clusters, queries."""

    heads: int
    group: int
    dim: int
    slots: int
    splits: int
    clusters: int
    queries: int
    dtype: Any

    @property
    def block(self) -> int:
        """Entries of a block: 16 KiB of keys, or more."""
        return max(BLOCK, 128 * BLOCK // self.dim)

    @property
    def each(self) -> int:
        """Rows of a block that a thread copies 16 bytes of."""
        return self.block * self.dim // (8 * t.THREADS * COPIERS)

    @property
    def stages(self) -> int:
        """Blocks of the ring, of which all but one are on their way."""
        return RING * 1024 // (2 * self.block * self.dim)

    @property
    def ahead(self) -> int:
        """Blocks on their way."""
        return self.stages - 1

    def places(self):
        """Yield, for each row of a block that this thread copies, the row, its chunk of 16 bytes and where that lies."""
        chunks = self.dim // 8
        chunk, first = t.thread(COPIERS) % chunks, t.thread(COPIERS) // chunks
        for step in range(self.each):
            row = first + step * (t.THREADS * COPIERS // chunks)
            tile = row // 8 * (self.dim // 64) + chunk // 8
            yield t.signed(row), t.signed(chunk), t.signed(tile * 1024 + row % 8 * 128 + ((chunk % 8) ^ (row % 8)) * 16)


def tiled():
    """Return the transforms of memory that `wgmma` reads: tiles of 8 rows and 64 numbers, swizzled by 128 bytes."""
    return plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def loader(n: Sizes, lists: Lists, position: bool):
    """Return the steps of the warpgroup that copies, as functions that are called in the kernel."""
    ref, tile, scalar = plgpu.RefType(), plgpu.RefType(tiled()), plgpu.Layout.WG_SPLAT
    rows_type = plgpu.ShapeDtypeStruct((t.THREADS * n.each,), jnp.int32, layout=t.own(n.each))
    bits_type = plgpu.ShapeDtypeStruct((t.THREADS,), jnp.int32, layout=t.own(1))

    own, some = t.own(n.each), (rows_type,) * lists.loads

    def fetch(refs, scalars):
        """Load what tells the rows of a block; nothing waits for it yet."""

        @plgpu.inline_mgpu(arg_types=((ref,) * len(refs), (scalar,) * len(scalars)), return_type=some)
        def run(ctx, refs, scalars):
            start, *scalars = (t.number(t.value(x)) for x in scalars)
            found = [lists.load(refs, scalars, start + row) for row, *_ in n.places()]
            return tuple(t.made_of(list(x)) for x in zip(*found, strict=True))

        return run(refs, scalars) if some else ()

    def resolve(loaded, scalars):
        """Find the rows of a block."""

        @plgpu.inline_mgpu(arg_types=((own,) * lists.loads, (scalar,) * len(scalars)), return_type=rows_type)
        def run(ctx, loaded, scalars):
            start, *scalars = (t.number(t.value(x)) for x in scalars)
            loaded = zip(*map(t.numbers_of, loaded), strict=True) if loaded else [()] * n.each
            return t.made_of([lists.row(scalars, start + row, x) for (row, *_), x in zip(n.places(), loaded, strict=True)])

        return run(loaded, scalars)

    @plgpu.inline_mgpu(arg_types=(ref, ref, tile, tile, own, scalar))
    def copy(ctx, key, value, key_ring, value_ring, rows, base):
        for source, ring in ((key, key_ring), (value, value_ring)):
            source, ring = t.address(source), t.number(t.address(ring))
            for (_, chunk, place), row in zip(n.places(), t.numbers_of(rows), strict=True):
                hidden, head = row < 0, t.element(t.number(t.value(base)), n.slots * n.dim, chunk * 8)
                index = arith.addi(head, t.element(hidden.select(t.number(0), row), n.dim, t.number(0)))
                size = hidden.select(t.number(0), t.number(16))  # a row that is not read becomes zeros
                t.ptx("cp.async.cg.shared.global [$0], [$1], 16, $2;", ring + place, t.at(source, index, 2), size)
        t.ptx("cp.async.commit_group;")

    @plgpu.inline_mgpu(arg_types=(ref, own, scalar), return_type=rows_type)
    def positions(ctx, position, rows, base):
        base = t.at(t.address(position), t.element(t.number(t.value(base)), n.slots, t.number(0)), 4)
        return t.made_of([t.load_int(t.at(base, (row < 0).select(t.number(0), row), 4)) for row in t.numbers_of(rows)])

    @plgpu.inline_mgpu(arg_types=((own,) * 3, t.own(1), ref, scalar), return_type=bits_type)
    def settle(ctx, arrays, bits, tags, write):
        """Write the tags of a block, of its rows, positions and biases; note which rows are hidden."""
        (bits,), tags = t.numbers_of(bits), t.number(t.address(tags))
        bits, write = bits << n.each, t.number(t.value(write)) > 0
        numbers = zip(*map(t.numbers_of, arrays), strict=True)
        for step, ((row, chunk, _), (place, at, bias)) in enumerate(zip(n.places(), numbers, strict=True)):
            hidden = (place | at) < 0 if position else place < 0
            bits = bits + hidden.select(t.number(1 << step), t.number(0))
            if n.queries:
                tag, kind = hidden.select(t.number(UNSEEN), at), "b32"
            else:
                bias = t.number(arith.bitcast(ir.F32Type.get(), t.value(bias)), None) if lists.biased else t.float_number(0)
                kind, tag = "f32", hidden.select(t.float_number(-math.inf), bias * LOG2_E)
            t.ptx(f"st.shared.{kind} [$0], $1;", tags + row * 4, tag, where=write & (chunk < 1))
        return t.made_of([bits])

    def ready(later):
        """Wait for a block after which ``later`` more are on their way, of which all but the newest may have their bits."""
        first = n.each * min(later, n.ahead - 2)

        @plgpu.inline_mgpu(arg_types=(tile, tile, t.own(1)))
        def run(ctx, key_ring, value_ring, bits):
            t.ptx(f"cp.async.wait_group {later};")
            if position:  # what was copied of slots that hold no token may be anything
                (bits,), zero = t.numbers_of(bits), t.number(0)
                for step, (_, _, place) in enumerate(n.places()):
                    hidden = ((bits >> (first + step)) & 1) > 0
                    for ring in (key_ring, value_ring):
                        where = t.number(t.address(ring)) + place
                        t.ptx("st.shared.v4.b32 [$0], {$1, $1, $1, $1};", where, zero, where=hidden)
            mgpu.utils.commit_shared()

        return run

    return fetch, resolve, copy, positions, settle, ready


def query_loader(n: Sizes):
    """Return functions that load the query [64, D] and each row's own position [64] into registers."""
    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT
    products = plgpu.ShapeDtypeStruct((ROWS, n.dim), n.dtype, layout=plgpu.Layout.WGMMA)
    by_row = plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, layout=plgpu.Layout.WGMMA.reduce(1))

    def filled(layout, shape, load, is_signed):
        registers = np.empty(layout.registers_shape(shape), dtype=object)
        for index, where in zip(layout.thread_idxs(shape), np.ndindex(registers.shape), strict=True):
            row, *column = (t.number(arith.index_castui(t.i32(), x)) for x in index)
            registers[where] = load(t.least(row, n.group - 1), *column)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)

    @plgpu.inline_mgpu(arg_types=(ref, scalar), return_type=products)
    def query(ctx, source, base):
        source, base = t.address(source), t.number(t.value(base)) * n.group
        pair = ir.VectorType.get((2,), mgpu.utils.dtype_to_ir_type(n.dtype))

        def load(row, column):
            bits = t.value(t.load_int(t.at(source, t.element(base + row, n.dim, column), 2)))
            return vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), t.i32()), bits))

        return filled(mgpu.WGMMA_LAYOUT, (ROWS, n.dim), load, None)

    @plgpu.inline_mgpu(arg_types=(ref, scalar), return_type=by_row)
    def asked(ctx, source, base):
        source, base = t.address(source), t.number(t.value(base)) * n.queries

        def load(row):
            found = t.load_int(t.at(source, base + row % n.queries, 4))
            return vector.broadcast(ir.VectorType.get((1,), t.i32()), t.value(found))

        return filled(mgpu.WGMMA_ROW_LAYOUT, (ROWS,), load, True)

    return query, asked


def merger(n: Sizes, out_dtype: Any, beside: int, beside_dtype: Any, peers: int):
    """Return functions that put a program's sums where its cluster reads them, and that merge these of ``peers`` programs.

    ``beside`` parts in global memory enter the same sums; of several clusters of a list, in the first.
    """
    ref, tile, scalar = plgpu.RefType(), plgpu.RefType(tiled()), plgpu.Layout.WG_SPLAT
    by_row, whole = plgpu.Layout.WGMMA.reduce(1), n.group * n.dim

    @plgpu.inline_mgpu(arg_types=(tile, plgpu.Layout.WGMMA, by_row, by_row))
    def publish(ctx, ring, sums, maximum, total):
        ring = t.number(t.address(ring))
        mgpu.utils.warpgroup_barrier()  # other warps may still read keys

        def store(x, index, first=0):
            row, *column = (t.number(arith.index_castui(t.i32(), i)) for i in index)
            place = (row * n.dim + column[0]) * 4 if column else row * 8 + 4 * (whole + first)
            t.ptx("st.shared.f32 [$0], $1;", ring + place, x, where=row < n.group)

        sums.foreach(lambda x, index: store(x, index))
        maximum.foreach(lambda x, index: store(x, index))
        total.foreach(lambda x, index: store(x, index, 1))
        mgpu.utils.warpgroup_barrier() if peers == 1 else t.meet_cluster()

    def published(ring, row, at):
        """List maximum, denominator and four sums of each program of the cluster."""
        f32 = ir.F32Type.get()
        for peer in range(peers):
            mine = t.number(t.ptx("mapa.shared::cluster.u32 $0, $1, $2;", ring, t.number(peer), result=t.i32()))
            pair = t.ptx("ld.shared::cluster.v2.f32 {$0, $1}, [$2];", mine + row * 8 + 4 * whole, result=(f32,) * 2)
            four = t.ptx("ld.shared::cluster.v4.f32 {$0, $1, $2, $3}, [$4];", mine + at * 4, result=(f32,) * 4)
            yield [t.number(x, None) for x in (*pair, *four)]

    def stored(refs, row, at, base, cluster):
        """List the same of each part in global memory."""
        zero = t.float_number(0)
        for part in range(beside):
            where = base * (beside * n.group) + row + part * n.group
            lse = t.load_float(t.at(t.address(refs[1]), where, 4), "float32")
            some, index = (lse > -math.inf) & (cluster < 1), [t.element(where, n.dim, at % n.dim + i) for i in range(4)]
            places = [t.at(t.address(refs[0]), x, jnp.dtype(beside_dtype).itemsize) for x in index]
            four = [some.select(t.load_float(x, beside_dtype), zero) for x in places]
            yield [some.select(lse * LOG2_E, t.float_number(-math.inf)), some.select(t.float_number(1), zero), *four]

    @plgpu.inline_mgpu(arg_types=((tile,) * bool(peers), ref, ref, (ref,) * (2 * bool(beside)), (scalar,) * 3))
    def merge(ctx, ring, out, lse, refs, where):
        base, cluster, split = (t.number(t.value(x)) for x in where)
        to, each = base * n.clusters + cluster, -(-whole // 4 // max(peers, 1))
        for step in range(-(-each // t.THREADS)):
            index = t.signed(t.thread()) + step * t.THREADS
            at = split * each + index
            mine = (index < each) & (at < whole // 4)
            at = t.least(at, whole // 4 - 1) * 4
            row, column = (t.signed(x) for x in divmod_unsigned(at, n.dim))
            found = [
                *(published(t.number(t.address(ring[0])), row, at) if peers else ()),
                *stored(refs, row, at, base, cluster),
            ]
            top = functools.reduce(lambda x, y: (x > y).select(x, y), [x for x, *_ in found])
            shift = (top > -math.inf).select(top, t.float_number(0))
            shares = [(x - shift).exp2(approx=True) for x, *_ in found]
            total, *sums = (sum(share * part[i] for share, part in zip(shares, found, strict=True)) for i in range(1, 6))
            divisor = (total > 0.0).select(total, t.float_number(1))
            store_four(t.address(out), t.element(to, whole, at), [x / divisor for x in sums], out_dtype, mine)
            whole_lse = (shift + total.log2(approx=True)) * (1 / LOG2_E)
            t.ptx(
                "st.global.f32 [$0], $1;", t.at(t.address(lse), to * n.group + row, 4), whole_lse, where=mine & (column < 1)
            )

    return publish, merge


def divmod_unsigned(x, divisor):
    """Return quotient and remainder of a number that is not negative."""
    x = t.number(t.value(x), signed=False)
    return x // divisor, x % divisor


def store_four(base, index, numbers, dtype, where):
    """Store four float32 numbers in a global array of ``dtype``."""
    place = t.at(base, index, jnp.dtype(dtype).itemsize)
    if dtype == jnp.float32:
        t.ptx("st.global.v4.f32 [$0], {$1, $2, $3, $4};", place, *numbers, where=where)
        return
    kind, half = mgpu.utils.dtype_to_ir_type(dtype), ir.IntegerType.get_signless(16)
    numbers = [arith.bitcast(half, arith.truncf(kind, t.value(x))) for x in numbers]
    t.ptx("st.global.v4.b16 [$0], {$1, $2, $3, $4};", place, *numbers, where=where)
