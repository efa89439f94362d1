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


def ref():
    """Return the type of a reference, which a JAX without Mosaic GPU lacks."""
    return plgpu.RefType()


def splat():
    """Return the type of a number that all threads have."""
    return plgpu.Layout.WG_SPLAT


def i32():
    """Return the type of 32-bit integers."""
    return ir.IntegerType.get_signless(32)


def f32():
    """Return the type of float32."""
    return ir.F32Type.get()


def number(value, signed: bool | None = True):
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


def shape(ref):
    """Return the shape of a ref."""
    return ir.MemRefType(ref.type).shape


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


def load_at(address, dtype, where, other):
    """Load an element where a truth value is true: a 16-bit float as float32, a truth value as int32; else ``other``."""
    dtype, f32, i16 = np.dtype(dtype), ir.F32Type.get(), ir.IntegerType.get_signless(16)
    flag = where.select(number(1), number(0))
    kind = {1: "u8", 2: "u16", 4: "b32"}[dtype.itemsize]
    text = (
        f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b{max(16, 8 * dtype.itemsize)} $0, $3; @p ld.global.{kind} $0, [$1]; }}"
    )
    result = i16 if dtype.itemsize < 4 else i32()
    bits = mgpu.utils.inline_ptx(
        text, address, value(flag), mgpu.utils.c(_bits(other, dtype), result), result_types=result, has_side_effects=True
    )
    if dtype.itemsize == 1:
        return number(arith.extui(i32(), bits))
    if dtype.kind == "i":
        return number(bits)
    if dtype.itemsize == 4:
        return number(arith.bitcast(f32, bits), None)
    return number(arith.extf(f32, arith.bitcast(mgpu.utils.dtype_to_ir_type(dtype), bits)), None)


def load_pack(address, dtype, count, where, other):
    """Load ``count`` neighbouring elements as `load_at` does, 16 bytes if more than one: int32, float32 or truth values."""
    dtype = np.dtype(dtype)
    if count == 1:
        return [load_at(address, dtype, where, other)]
    moves = " ".join(f"mov.b32 ${i}, $6;" for i in range(4))
    text = f"{{ .reg .pred p; setp.ne.s32 p, $5, 0; {moves} @p ld.global.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"
    flag, fill = where.select(number(1), number(0)), mgpu.utils.c(_bits(other, dtype) if dtype.itemsize == 4 else 0, i32())
    words = mgpu.utils.inline_ptx(text, address, value(flag), fill, result_types=(i32(),) * 4, has_side_effects=True)
    if dtype.itemsize == 1:
        return [(number(x) >> (8 * i)) & 255 for x in words for i in range(4)]
    return [number(arith.bitcast(ir.F32Type.get(), x), None) if dtype.kind == "f" else number(x) for x in words]


def _bits(x, dtype):
    """Return the bits of a Python number in a dtype as a signed int."""
    x = np.asarray(x, dtype)
    return int(x.view({1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize]))


def store_at(address, x, dtype, where):
    """Store a float32 or int32 number, rounded to the dtype of the memory, where a truth value is true."""
    dtype, x = np.dtype(dtype), value(x)
    if dtype.itemsize == 2:
        x = arith.bitcast(ir.IntegerType.get_signless(16), arith.truncf(mgpu.utils.dtype_to_ir_type(dtype), x))
    kind = {1: "u8", 2: "b16", 4: "f32" if dtype.kind == "f" else "b32"}[dtype.itemsize]
    ptx(f"st.global.{kind} [$0], $1;", address, x, where=where)


def rounded(x, dtype):
    """Round a float32 number to ``dtype``, a float of 16 bits, and return it as float32."""
    return number(arith.extf(ir.F32Type.get(), arith.truncf(mgpu.utils.dtype_to_ir_type(np.dtype(dtype)), value(x))), None)


def special(name):
    """Read a special register."""
    return number(mgpu.utils.inline_ptx(f"mov.u32 $0, %{name};", result_types=i32()))


def ballot(bit):
    """Return a word whose bit i tells whether the number of thread i of this warp is not 0."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return number(mgpu.utils.inline_ptx(text, value(bit), result_types=i32(), has_side_effects=True, convergent=True))


def popcount(x):
    """Count the bits of a number."""
    return number(mgpu.utils.inline_ptx("popc.b32 $0, $1;", value(x), result_types=i32()))


def shuffle_up(x, step):
    """Return the number that the thread ``step`` places before this one in its warp has."""
    text = f"shfl.sync.up.b32 $0, $1, {step}, 0, 0xffffffff;"
    return number(mgpu.utils.inline_ptx(text, value(x), result_types=i32(), has_side_effects=True, convergent=True))


def plus(wide, x):
    """Add a number to a value of 64 bits."""
    return arith.addi(wide, arith.extsi(ir.IntegerType.get_signless(64), value(x)))


def load_shared_float(address):
    """Load a float32 from shared memory."""
    return number(ptx("ld.shared.f32 $0, [$1];", address, result=ir.F32Type.get()), None)


def load_shared(address):
    """Load an int32 from shared memory."""
    return number(ptx("ld.shared.b32 $0, [$1];", address, result=i32()))


def float_number(x):
    """Make a float32 number of a Python number."""
    return number(arith.constant(ir.F32Type.get(), float(x)), None)


# The default of the barrier releases all memory, which takes a fence of the whole GPU.
MEET_CLUSTER = (
    "fence.release.sync_restrict::shared::cta.cluster;",
    "barrier.cluster.arrive.relaxed.aligned;",
    "barrier.cluster.wait.aligned;",
)


def meet_cluster():
    """Wait for all threads of all blocks of the cluster, and see what they wrote in the shared memory of their own block."""
    for line in MEET_CLUSTER:
        ptx(line)


def fused(total, factors):
    """Return ``total`` and the product of two factors added to it, rounded once; all are float32 numbers."""
    text = "fma.rn.f32 $0, $1, $2, $3;"
    operands = [value(x) for x in (*factors, total)]
    return number(mgpu.utils.inline_ptx(text, *operands, result_types=ir.F32Type.get()), None)


def greatest(x, y):
    """Return the larger one of two float32 numbers; NaN if one of them is."""
    return number(mgpu.utils.inline_ptx("max.NaN.f32 $0, $1, $2;", value(x), value(y), result_types=ir.F32Type.get()), None)


def shuffle(x, distance):
    """Return the number of the thread whose index in the warp differs by the bit ``distance``."""
    return number(mgpu.utils.shfl_bfly(value(x), distance), x.is_signed)


def load_words(address, offset, count):
    """Load one, two or four int32 from global memory, ``offset`` bytes behind an address; both multiples of their bytes."""
    names = ", ".join(f"${i}" for i in range(count))
    kind, names = (f".v{count}.b32", f"{{{names}}}") if count > 1 else (".b32", names)
    text, types = f"ld.global.nc{kind} {names}, [${count} + {offset}];", (i32(),) * count
    found = mgpu.utils.inline_ptx(text, address, result_types=types if count > 1 else i32())
    return [number(x) for x in (found if count > 1 else [found])]


def load_some(address, dtype, count):
    """Load up to 8 neighbouring bfloat16, float16 or float32 numbers from global memory, as float32 numbers.

    ``count`` is a power of two, and the address a multiple of their bytes.
    """
    total = count * np.dtype(dtype).itemsize // 4  # words
    if not total:
        return [load_float(address, dtype)]
    return floats_of([x for at in range(0, total, 4) for x in load_words(address, 4 * at, min(total, 4))], dtype)


def floats_of(words, dtype):
    """Make float32 numbers of the bfloat16, float16 or float32 numbers in words."""
    f32, dtype = ir.F32Type.get(), np.dtype(dtype)
    if dtype.itemsize == 4:
        return [number(arith.bitcast(f32, value(x)), None) for x in words]
    if dtype.name == "bfloat16":  # the upper half of a float32
        halves = [y for x in words for y in (x << 16, x & -0x10000)]
        return [number(arith.bitcast(f32, value(x)), None) for x in halves]
    pair, word = ir.VectorType.get((2,), ir.F16Type.get()), ir.VectorType.get((1,), i32())
    places = [ir.DenseI64ArrayAttr.get([i]) for i in (0, 1)]
    pairs = [vector.bitcast(pair, vector.broadcast(word, value(x))) for x in words]
    halves = [vector.extract(x, dynamic_position=[], static_position=i) for x in pairs for i in places]
    return [number(arith.extf(f32, x), None) for x in halves]
