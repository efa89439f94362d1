"""What single threads do inside `plgpu.inline_mgpu`: their numbers, memory access in PTX, barriers of a cluster.

A warpgroup has 128 threads. A number of a thread is a Mosaic array without axes, which has Python's operators. Arrays of
shape [128 * N] in the layout of `own` give each thread N numbers; kernels carry them from step to step in registers.
"""

import numpy as np

from pallas_kernels._mosaic_gpu.pallas import arith, builtin, gpu, ir, llvm, mgpu, plgpu, vector

THREADS = 128


def own(count):
    """Return the layout of an array that has ``count`` numbers for each thread."""
    return plgpu.Layout.WG_STRIDED((THREADS * count,), vec_size=1)


def i32():
    """Return the type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def number(value, signed=True):
    """Make a number of a value, or of a constant int32."""
    if isinstance(value, int):
        value = mgpu.utils.c(value, i32())
    return mgpu.FragmentedArray.splat(value, (), is_signed=signed)


def value(x):
    """Return the value of a number."""
    return x.registers.item()


def thread(last=1):
    """Return the index of this thread in its warpgroup, or in the ``last`` of 1 + ``last`` warpgroups.

    It has no sign: its quotients are shifts.
    """
    x = number(arith.index_castui(i32(), gpu.thread_id(gpu.Dimension.x)), signed=False)
    return x % THREADS if last == 1 else x - THREADS


def signed(x):
    """Return the same 32 bits as a number with a sign."""
    return number(value(x))


def least(x, y):
    """Return the smaller one of two numbers."""
    y = number(y) if isinstance(y, int) else y
    return (x < y).select(x, y)


def numbers_of(array, floats=False):
    """List the numbers that an array in the layout of `own` gives this thread."""
    at = ir.DenseI64ArrayAttr.get([0])
    found = [vector.extract(x, dynamic_position=[], static_position=at) for x in array.registers.flat]
    return [number(x, None if floats else True) for x in found]


def made_of(numbers, floats=False):
    """Make the array in the layout of `own` that has these int32 or float32 numbers for this thread."""
    registers, kind = np.empty((len(numbers),), dtype=object), ir.F32Type.get() if floats else i32()
    for at, x in enumerate(numbers):
        registers[at] = vector.broadcast(ir.VectorType.get((1,), kind), value(x))
    layout = mgpu.WGStridedFragLayout((THREADS * len(numbers),), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None if floats else True)


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
    """Run one PTX instruction on numbers or values; ``where``: a truth value, without which nothing is done."""
    operands = [x if isinstance(x, ir.Value) else value(x) for x in operands]
    options = {"has_side_effects": True} if result else {"predicate": None if where is None else value(where)}
    return mgpu.utils.inline_ptx(text, *operands, result_types=result, **options)


def load_int(address, kind="b32"):
    """Load an int32 from global memory, or with "u8" a byte."""
    found = mgpu.utils.inline_ptx(f"ld.global.nc.{kind} $0, [$1];", address, result_types=i32())
    return number(found)


def load_float(address, dtype):
    """Load a bfloat16, a float16 or a float32 from global memory, as a float32 number."""
    f32, name = ir.F32Type.get(), np.dtype(dtype).name
    if name == "float32":
        return number(mgpu.utils.inline_ptx("ld.global.nc.f32 $0, [$1];", address, result_types=f32), None)
    bits = mgpu.utils.inline_ptx("ld.global.nc.u16 $0, [$1];", address, result_types=ir.IntegerType.get_signless(16))
    kind = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[name].get()
    return number(arith.extf(f32, arith.bitcast(kind, bits)), None)


def float_number(x):
    """Make a float32 number of a Python number."""
    return number(arith.constant(ir.F32Type.get(), float(x)), None)


def meet_cluster():
    """Wait for all threads of all blocks of the cluster."""
    ptx("barrier.cluster.arrive.aligned;")
    ptx("barrier.cluster.wait.aligned;")
