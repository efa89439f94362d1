"""What single threads do inside `plgpu.inline_mgpu`: their numbers, memory access in PTX, products of a warp, barriers.

A warpgroup has 128 threads, which are 4 warps of 32 lanes. A number of a thread is a Mosaic array without axes, which has
Python's operators. Arrays of shape [128 * N] in the layout of `own` give each thread N numbers; kernels carry them from step
to step in registers.
"""

import math

import numpy as np

from pallas_kernels._mosaic_gpu.pallas import arith, builtin, gpu, ir, llvm, mgpu, plgpu, vector

THREADS, LANES = 128, 32  # of a warpgroup and of a warp
INFINITY = math.inf


def own(count):
    """Return the layout of an array that has ``count`` numbers for each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=1)


def i32():
    """Return the type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def f32():
    """Return the type of float32."""
    return ir.F32Type.get()


def number(value, signed=True):
    """Make a number of a value, or of a constant int32 or float32."""
    if isinstance(value, int):
        value = mgpu.utils.c(value, i32())
    elif isinstance(value, float):
        value = arith.constant(f32(), value)
    return mgpu.FragmentedArray.splat(value, (), is_signed=signed if isinstance(value.type, ir.IntegerType) else None)


def value(x):
    """Return the value of a number."""
    return x.registers.item()


def thread():
    """Return the index of this thread in its block; it has no sign: its quotients are shifts."""
    return number(arith.index_castui(i32(), gpu.thread_id(gpu.Dimension.x)), signed=False)


def lane():
    """Return the index of this thread in its warp, without a sign."""
    return thread() % LANES


def warp():
    """Return the index of this thread's warp in its block."""
    return signed(thread() // LANES)


def signed(x):
    """Return the same 32 bits as a number with a sign."""
    return number(value(x))


def least(x, y):
    """Return the smaller one of two numbers."""
    y = number(y) if isinstance(y, int) else y
    return (x < y).select(x, y)


def most(x, y):
    """Return the larger one of two numbers."""
    return x.max(y)


def numbers_of(array):
    """List the numbers that an array in the layout of `own` gives this thread."""
    at = ir.DenseI64ArrayAttr.get([0])
    return [number(vector.extract(x, dynamic_position=[], static_position=at)) for x in array.registers.flat]


def made_of(numbers):
    """Make the array in the layout of `own` that has these int32 or float32 numbers for this thread."""
    registers = np.empty((len(numbers),), dtype=object)
    for at, x in enumerate(map(value, numbers)):
        registers[at] = vector.broadcast(ir.VectorType.get((1,), x.type), x)
    layout, whole = mgpu.WGStridedFragLayout((THREADS * len(numbers),), 1), isinstance(x.type, ir.IntegerType)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=True if whole else None)


def address(ref):
    """Return the address of a ref as an integer: 64 bits in global memory, 32 bits in shared memory."""
    kind, i64 = ir.MemRefType(ref.type), ir.IntegerType.get_signless(64)
    if mgpu.utils.bitwidth(kind.element_type) >= 8:
        return llvm.ptrtoint(i32() if mgpu.utils.is_smem_ref(ref) else i64, mgpu.utils.memref_ptr(ref))
    # Mosaic counts the offset of a mapped array of truth values in bits; it has a byte for each.
    pointer, many = llvm.PointerType.get(), llvm.ArrayType.get(i64, kind.rank)
    fields = llvm.StructType.get_literal([pointer, pointer, i64, many, many])
    descriptor = builtin.unrealized_conversion_cast([fields], [ref])
    start, offset = llvm.extractvalue(pointer, descriptor, [1]), llvm.extractvalue(i64, descriptor, [2])
    return arith.addi(llvm.ptrtoint(i64, start), offset)


def at(base, index, size):
    """Return the global address of element ``index``, a number, of elements of ``size`` bytes; it has 64 bits."""
    i64 = ir.IntegerType.get_signless(64)
    wide = index if isinstance(index, ir.Value) else arith.extsi(i64, value(index))
    return arith.addi(base, arith.muli(wide, mgpu.utils.c(size, i64)))


def element(row, width, column):
    """Return ``row * width + column`` in 64 bits, of numbers ``row`` and ``column`` and an int ``width``."""
    i64 = ir.IntegerType.get_signless(64)
    wide = [arith.extsi(i64, value(x)) for x in (row, column)]
    return arith.addi(arith.muli(wide[0], mgpu.utils.c(width, i64)), wide[1])


def ptx(text, *operands, result=None, where=None):
    """Run one PTX instruction on numbers or values; ``where``: a truth value, without which nothing is done.

    With ``result``, a type, or several in a tuple, return numbers.
    """
    operands = [x if isinstance(x, ir.Value) else value(x) for x in operands]
    if result is None:
        return mgpu.utils.inline_ptx(text, *operands, predicate=None if where is None else value(where), convergent=True)
    found = mgpu.utils.inline_ptx(text, *operands, result_types=result, has_side_effects=True, convergent=True)
    return [number(x) for x in found] if isinstance(found, tuple) else number(found)


def load_int(address, kind="b32"):
    """Load an int32 from global memory, or with "u8" a byte."""
    found = mgpu.utils.inline_ptx(f"ld.global.nc.{kind} $0, [$1];", address, result_types=i32())
    return number(found)


def load_float(address, dtype):
    """Load a bfloat16, a float16 or a float32 from global memory, as a float32 number."""
    f32, name = ir.F32Type.get(), np.dtype(dtype).name
    if name == "float32":
        return number(mgpu.utils.inline_ptx("ld.global.nc.f32 $0, [$1];", address, result_types=f32))
    bits = mgpu.utils.inline_ptx("ld.global.nc.u16 $0, [$1];", address, result_types=ir.IntegerType.get_signless(16))
    kind = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[name].get()
    return number(arith.extf(f32, arith.bitcast(kind, bits)))


def copy_async(to, source, size, where, offset=0):
    """Begin to copy ``size`` bytes from a global to a shared address; 16 bytes leave nothing in the level-1 cache."""
    kind = "cg" if size == 16 else "ca"
    ptx(f"cp.async.{kind}.shared.global [$0 + {offset}], [$1], {size};", to, source, where=where)


def end_step():
    """Make all copies that this thread began since the last call a step."""
    ptx("cp.async.commit_group;")


def wait_for_step(later):
    """Wait until the copies have arrived that this warp began, but for the ``later`` newest steps."""
    ptx(f"cp.async.wait_group {later};")
    meet_warp()


def store_shared(to, numbers, where, offset=0):
    """Store 1, 2 or 4 numbers at a shared address."""
    many, names = ("", "$1") if len(numbers) == 1 else (f".v{len(numbers)}", "{$1, $2, $3, $4}"[: 4 * len(numbers) - 1] + "}")
    ptx(f"st.shared{many}.b32 [$0 + {offset}], {names};", to, *numbers, where=where)


def load_shared(source, kinds, offset=0, far=False):
    """Load 2 or 4 numbers of types ``kinds`` from a shared address, or from one of another block of the cluster."""
    names, last = "{$0, $1, $2, $3}"[: 4 * len(kinds) - 1] + "}", len(kinds)
    text = f"ld.shared{'::cluster' * far}.v{last}.b32 {names}, [${last} + {offset}];"
    return ptx(text, source, result=kinds)


def far_address(address, peer):
    """Return where another block of the cluster has what this block has at a shared address."""
    return ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, number(peer), result=i32())


def word_of(place):
    """Return the global address of the word that has the 16 bits at ``place``, and whether they are its second half."""
    i64 = ir.IntegerType.get_signless(64)
    second = arith.trunci(i32(), arith.andi(place, mgpu.utils.c(2, i64)))
    return arith.andi(place, mgpu.utils.c(-4, i64)), number(second) > 0


def half_of(word, second):
    """Return the half of an int32 as a bfloat16, which becomes a float32 number."""
    bits = arith.select(value(second), value(word & -0x10000), value(word * 0x10000))
    return number(arith.bitcast(f32(), bits))


def lane_value(x, lane):
    """Return the number ``x`` of another lane of the warp."""
    return ptx("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lane, result=i32())


def over_quad(x, combine):
    """Combine a float32 number with those of the three other lanes that share a row of a product."""
    for distance in (1, 2):
        x = combine(x, ptx(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", x, result=f32()))
    return x


def load_matrices(address, offset, transposed=False):
    """Load four matrices of 8 x 8 numbers of 16 bits from shared memory; each lane has the address of one row of one."""
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return ptx(text, address, result=(i32(),) * 4)


def multiply(sums, left, right, dtype):
    """Add the product of 16 x 16 and 16 x 8 numbers to 16 x 8 float32 numbers, four of each lane."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    text += " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    return ptx(text, *left, *right, *sums, result=(f32(),) * 4)


def decode(x, low, high, kind, dtype):
    """Make two numbers of 16 bits, in one int32, of the bytes ``low`` and ``high`` of an int32; they are codes."""
    name = np.dtype(dtype).name
    if kind == "float8_e4m3fn":
        text = f".reg .b32 w; .reg .b16 h; prmt.b32 w, $1, 0, 0x44{high}{low}; cvt.u16.u32 h, w;"
        if name == "float16":
            text += " cvt.rn.f16x2.e4m3x2 $0, h;"
        else:
            text += " .reg .b16 l; .reg .f32 x, y; cvt.rn.f16x2.e4m3x2 w, h; mov.b32 {l, h}, w;"
            text += " cvt.f32.f16 x, l; cvt.f32.f16 y, h; cvt.rn.bf16x2.f32 $0, y, x;"
    elif name == "float16":  # 1024 + 128 + code, which is exact, less 1152
        text = f".reg .b32 w; xor.b32 w, $1, 0x80808080; prmt.b32 w, w, 0x64646464, 0x4{high}4{low};"
        text += " .reg .b32 m; mov.b32 m, 0x64806480; sub.rn.f16x2 $0, w, m;"
    else:  # 128 + the code's low bits, less 128, or less 256 if the code is negative; these too are its bits behind 0x43
        text = f".reg .b32 w, m, n; prmt.b32 w, $1, 0x43434343, 0x4{high}4{low}; and.b32 m, w, 0xff80ff80;"
        text += " and.b32 w, w, 0xff7fff7f; mov.b32 n, 0xbf80bf80; fma.rn.bf16x2 $0, m, n, w;"
    found = mgpu.utils.inline_ptx("{ " + text + " }", value(x), result_types=i32())
    return number(found)


def pair(low, high, dtype):
    """Round two float32 numbers to 16 bits each, in one int32 number."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[np.dtype(dtype).name]
    return ptx(f"cvt.rn.{kind}.f32 $0, $1, $2;", high, low, result=i32())


def meet_warp():
    """Wait for all lanes of the warp, and see what they wrote."""
    ptx("bar.warp.sync -1;")


def meet_block():
    """Wait for all threads of the block."""
    ptx("barrier.sync 0;")


def meet_cluster():
    """Wait for all threads of all blocks of the cluster."""
    ptx("barrier.cluster.arrive.aligned;")
    ptx("barrier.cluster.wait.aligned;")
