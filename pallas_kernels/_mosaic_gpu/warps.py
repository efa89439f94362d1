"""What a warp does inside `plgpu.inline_mgpu`, one function for each instruction: copies, shared memory, products, barriers.

A warp has 32 lanes; each function is called by all of them. Numbers are those of `threads`.
"""

import numpy as np

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import arith, gpu, ir, mgpu

LANES = 32


def f32():
    """Return the type of float32."""
    return ir.F32Type.get()


def thread():
    """Return the index of this thread in its block; it has no sign, so its quotients are shifts."""
    return t.number(arith.index_castui(t.i32(), gpu.thread_id(gpu.Dimension.x)), signed=False)


def lane():
    """Return the index of this lane, without a sign."""
    return thread() % LANES


def warp():
    """Return the index of this warp in its block."""
    return t.signed(thread() // LANES)


def most(x, y):
    """Return the larger one of two numbers."""
    return x.max(y)


def _run(text, *operands, result):
    """Run an instruction of all lanes; ``result``: types of its results, which are numbers."""
    operands = [x if isinstance(x, ir.Value) else t.value(x) for x in operands]
    found = mgpu.utils.inline_ptx(text, *operands, result_types=tuple(result), has_side_effects=True, convergent=True)
    return [t.number(x, isinstance(x.type, ir.IntegerType) or None) for x in found]


def _meet(text):
    """Run a barrier."""
    mgpu.utils.inline_ptx(text, convergent=True)


def word_of(place):
    """Return the global address of the word that has the 16 bits at ``place``, and whether they are its second half."""
    i64 = ir.IntegerType.get_signless(64)
    second = arith.trunci(t.i32(), arith.andi(place, mgpu.utils.c(2, i64)))
    return arith.andi(place, mgpu.utils.c(-4, i64)), t.number(second) > 0


def half_of(word, second):
    """Return the half of an int32 as a bfloat16, which becomes a float32 number."""
    bits = arith.select(t.value(second), t.value(word & -0x10000), t.value(word * 0x10000))
    return t.number(arith.bitcast(f32(), bits), None)


def lane_value(x, lane):
    """Return the number ``x`` of another lane of the warp."""
    return _run("shfl.sync.idx.b32 $0, $1, $2, 31, -1;", x, lane, result=[t.i32()])[0]


def redux(x, fold):
    """Fold an int32 number over the lanes of the warp: "add", "min" or "max"."""
    return _run(f"redux.sync.{fold}.s32 $0, $1, -1;", x, result=[t.i32()])[0]


def over_quad(x, combine):
    """Combine a float32 number with those of the three other lanes that share a row of a product."""
    for distance in (1, 2):
        x = combine(x, *_run(f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;", x, result=[f32()]))
    return x


def copy_async(to, source, size, where, offset=0):
    """Begin to copy ``size`` bytes from a global to a shared address; 16 bytes leave nothing in the level-1 cache.

    The level-2 cache then asks memory for a line of 128 bytes at once, which takes 0.98 of the time for lists of rows.
    """
    kind = "cg.shared.global.L2::128B" if size == 16 else "ca.shared.global"
    t.ptx(f"cp.async.{kind} [$0 + {offset}], [$1], {size};", to, source, where=where)


def end_step():
    """Make all copies that this thread began since the last call a step."""
    t.ptx("cp.async.commit_group;")


def wait_for_step(later):
    """Wait until the copies have arrived that this warp began, but for the ``later`` newest steps."""
    t.ptx(f"cp.async.wait_group {later};")
    meet_warp()


def store_shared(to, numbers, where, offset=0):
    """Store 1, 2 or 4 numbers at a shared address."""
    many, names = ("", "$1") if len(numbers) == 1 else (f".v{len(numbers)}", "{$1, $2, $3, $4}"[: 4 * len(numbers) - 1] + "}")
    t.ptx(f"st.shared{many}.b32 [$0 + {offset}], {names};", to, *numbers, where=where)


def load_shared(source, kinds, offset=0, far=False):
    """Load 2 or 4 numbers of types ``kinds`` from a shared address, or from one of another block of the cluster."""
    names, last = "{$0, $1, $2, $3}"[: 4 * len(kinds) - 1] + "}", len(kinds)
    text = f"ld.shared{'::cluster' * far}.v{last}.b32 {names}, [${last} + {offset}];"
    return _run(text, source, result=kinds)


def load_word(source, offset):
    """Load an int32 from a shared address."""
    return _run(f"ld.shared.b32 $0, [$1 + {offset}];", source, result=[t.i32()])[0]


def far_address(address, peer):
    """Return where another block of the cluster has what this block has at a shared address."""
    peer = t.number(peer) if isinstance(peer, int) else peer
    return _run("mapa.shared::cluster.u32 $0, $1, $2;", address, peer, result=[t.i32()])[0]


def load_matrices(address, offset, transposed=False):
    """Load four matrices of 8 x 8 numbers of 16 bits from shared memory; each lane has the address of one row of one."""
    kind = ".trans" if transposed else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4 + {offset}];"
    return _run(text, address, result=[t.i32()] * 4)


def multiply(sums, left, right, dtype):
    """Add the product of 16 x 16 and 16 x 8 numbers to 16 x 8 float32 numbers, four of each lane."""
    kind = {"bfloat16": "bf16", "float16": "f16"}[np.dtype(dtype).name]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"
    text += " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    return _run(text, *left, *right, *sums, result=[f32()] * 4)


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
    found = mgpu.utils.inline_ptx("{ " + text + " }", t.value(x), result_types=t.i32())
    return t.number(found)


def cosine_sine(place, inv_freq):
    """Return cosine and sine of an int32 times a float32, to 2e-6; whole turns are subtracted before, in two pieces."""
    text = "{ .reg .f32 x, n; cvt.rn.f32.s32 x, $2; mul.rn.f32 x, x, $3; mul.rn.f32 n, x, 0f3E22F983; cvt.rni.f32.f32 n, n;"
    text += " fma.rn.f32 x, n, 0fC0C90000, x; fma.rn.f32 x, n, 0fBAFDAA22, x; cos.approx.f32 $0, x; sin.approx.f32 $1, x; }"
    found = mgpu.utils.inline_ptx(text, t.value(place), t.value(inv_freq), result_types=(f32(), f32()))
    return [t.number(x, None) for x in found]


def parted(x, dtype):
    """Return the two numbers of 16 bits in an int32 as float32 numbers."""
    if np.dtype(dtype).name == "float16":
        text = "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.f32.f16 $0, l; cvt.f32.f16 $1, h; }"
    else:
        text = "{ .reg .b32 l; shl.b32 l, $2, 16; mov.b32 $0, l; and.b32 l, $2, 0xffff0000; mov.b32 $1, l; }"
    return [t.number(x, None) for x in mgpu.utils.inline_ptx(text, t.value(x), result_types=(f32(), f32()))]


def pair(low, high, dtype):
    """Round two float32 numbers to 16 bits each, in one int32 number."""
    kind = {"bfloat16": "bf16x2", "float16": "f16x2"}[np.dtype(dtype).name]
    return _run(f"cvt.rn.{kind}.f32 $0, $1, $2;", high, low, result=[t.i32()])[0]


def meet_warp():
    """Wait for all lanes of the warp, and see what they wrote."""
    _meet("bar.warp.sync -1;")


def meet_block():
    """Wait for all threads of the block."""
    _meet("barrier.sync 0;")


LOWER, MIDDLE, UPPER = 0x5410, 0x5432, 0x7632  # halves of two words: both first ones, the inner ones, both second ones


def permuted(x, y, order):
    """Return the bytes of two int32 that the four digits of ``order`` number, the last digit first."""
    return t.number(mgpu.utils.inline_ptx(f"prmt.b32 $0, $1, $2, {order};", t.value(x), t.value(y), result_types=t.i32()))


def store_half(to, x, offset):
    """Store the first half of an int32 at a shared address."""
    t.ptx(f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; st.shared.b16 [$0 + {offset}], l; }}", to, x)


def transposed(x):
    """Transpose a matrix of 8 x 8 numbers of 16 bits, of which each lane has two neighbours of a row."""
    return _run("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", x, result=[t.i32()])[0]


def unpack(word, place, half, channels, two):
    """List the values of some channels of this lane, two of 16 bits in a word, with zeros for channels without a bit.

    The last number of the list is ``place`` for the second half of the same vector.

    Args:
        word: a bit for each of 32 channels of a vector, or of 16 of ``two``.
        place: the shared address in front of the first value; behind each value is its successor, and then the next one's.
        half: which half of the word.
        channels: how many of it, 4, 8 or 16.
        two: whether the word is of two vectors.
    """
    return _run(unpacking(half, channels, two), word, place, result=[t.i32()] * (channels // 2 + 1))


def unpacking(half, channels, two):
    """Return the PTX of `unpack`."""
    words, lines = channels // 2, []
    bits, place = (f"${words + i}" for i in (1, 2))
    # The second channel of a pair has the value before the word that the first channels so far end at: so sums are of a
    # pair's first channel and the second one of the pair before.
    lines.append(f"shl.b32 u, {bits}, 1;" + f" and.b32 u, u, {0xFFFEFFFE};" * two)
    lines.append("shr.u32 s, u, 1; and.b32 s, s, 0x55555555; sub.u32 v, u, s; and.b32 p0, v, 0x03030303;")
    for i in (1, 2, 3):  # of four pairs in a byte, the first ones
        lines.append(f"shr.u32 s, v, {2 * i}; and.b32 s, s, 0x03030303; add.u32 p{i}, p{i - 1}, s;")
    lines.append(f"shr.u32 y, {bits}, 1; or.b32 y, y, {bits}; mov.b32 x0, {bits};")
    lines += [f"shl.b32 x{i}, {bits}, {i};" for i in range(1, 8)]
    for pair in range(words):
        before = place if pair < 4 else "w3"
        lines.append(f"dp4a.u32.u32 w{pair}, p{pair % 4}, {4 << 8 * (2 * half + pair // 4)}, {before};")
    lines.append(f"mov.b32 ${words}, w{words - 1};")
    for pair in range(words):
        byte, at = 2 * half + pair // 4, 2 * (pair % 4)
        # Signs of bytes become masks. Tests of single bits become one instruction for four predicates.
        lines.append(f"and.b32 q, y, {1 << 16 * half + 2 * pair}; setp.ne.u32 z{pair}, q, 0;")
        lines.append(f"@z{pair} ld.shared.b32 w{pair}, [w{pair}];")
        lines.append(
            f"prmt.b32 q, x{7 - at}, x{6 - at}, {0x1100 * (12 + byte) + 0x11 * (8 + byte)}; and.b32 ${pair}, w{pair}, q;"
        )
    registers = "u, s, v, y, q, x<8>, p<4>"
    return f"{{ .reg .b32 w<{words}>, {registers}; .reg .pred z<{words}>; {' '.join(lines)} }}"
