"""A warp in NumPy, in the place of `pallas_kernels._mosaic_gpu.warps`: 32 lanes, shared memory, and products.

Nothing interprets inline PTX. So what kernels compute with functions of `warps` runs here on a CPU, and only the functions
themselves, one instruction each, are left to a GPU. Layouts of `mma` and `ldmatrix` are those of the PTX manual.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels._mosaic_gpu import warps

LANES = 32
_LANE = np.arange(LANES)
_ROW, _COLUMN = _LANE // 4, _LANE % 4 * 2


class Number:
    """A number of each lane, int64 or float32, with the operators of Mosaic's arrays without axes."""

    def __init__(self, each):
        self.each = np.broadcast_to(each, (LANES,))

    def select(self, yes, no):
        return Number(np.where(self.each, yes.each, no.each))

    def max(self, other):
        return Number(np.maximum(self.each, other.each))

    def exp2(self, approx):
        return Number(np.exp2(self.each))


def _operator(name):
    def apply(self, other):
        return Number(getattr(self.each, name)(other.each if isinstance(other, Number) else other))

    return apply


for _name in ("add", "radd", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge"):
    setattr(Number, f"__{_name}__", _operator(f"__{_name}__"))


class Warp:
    """The functions of `warps`, and of `threads` those that make numbers; ``memory``: shared memory, an array of bytes."""

    def __init__(self, size):
        self.memory, self.stores, self.arrays = np.zeros(size, np.uint8), [], []

    LOWER, MIDDLE, UPPER = warps.LOWER, warps.MIDDLE, warps.UPPER
    number = staticmethod(lambda x, signed=True: x if isinstance(x, Number) else Number(np.int64(x)))
    value = numbers_of = made_of = staticmethod(lambda x: x)
    thread, warp = staticmethod(lambda: Number(_LANE)), staticmethod(lambda: Number(0))
    shape, end_step = staticmethod(np.shape), staticmethod(lambda: None)
    at = staticmethod(lambda base, index, size: base + index * size)
    element = staticmethod(lambda row, width, column: row * width + column)
    lane_value = staticmethod(lambda x, lane: Number(x.each[lane.each]))
    float_number = staticmethod(lambda x: Number(np.float32(x)))
    lane = staticmethod(lambda: Number(_LANE))
    signed = staticmethod(lambda x: x)
    most = staticmethod(Number.max)
    i32 = staticmethod(lambda: np.int32)
    f32 = staticmethod(lambda: np.float32)

    @staticmethod
    def over_quad(x, combine):
        for distance in (1, 2):
            x = combine(x, Number(x.each[_LANE ^ distance]))
        return x

    @staticmethod
    def decode(x, low, high, kind, dtype):
        two = x.each.astype(np.int32).view(np.uint8).reshape(LANES, 4)[:, [low, high]].view(jnp.dtype(kind))
        return _packed(two.astype(dtype).view(np.uint16))

    @staticmethod
    def half_of(word, second):
        bits = np.where(second.each, word.each >> 16, word.each) & 0xFFFF
        return Number(bits.astype(np.uint16).view(jnp.bfloat16).astype(np.float32))

    @staticmethod
    def pair(low, high, dtype):
        return _packed(np.stack([low.each, high.each], 1).astype(dtype).view(np.uint16))

    @staticmethod
    def cosine_sine(place, inv_freq):
        angle = np.float64(place.each.astype(np.float32) * inv_freq.each)
        return [Number(x.astype(np.float32)) for x in (np.cos(angle), np.sin(angle))]

    @staticmethod
    def parted(x, dtype):
        return [Number(x.astype(np.float32)) for x in _parted(x, dtype).T]

    def load_word(self, source, offset):
        return Number(np.array([self.memory[x + offset :][:4].view(np.int32)[0] for x in source.each], np.int64))

    def load_shared(self, source, kinds, offset=0):
        taken = [self.memory[x + offset :][: 4 * len(kinds)].view(np.uint32) for x in source.each]
        return [Number(column.view(kind)) for column, kind in zip(np.stack(taken, 1), kinds, strict=True)]

    def load_matrices(self, source, offset, transposed=False):
        rows = np.stack([self.memory[x + offset :][:16].view(np.uint16) for x in source.each]).reshape(4, 8, 8)
        return [_packed(x[_ROW[:, None], _COLUMN[:, None] + [0, 1]]) for x in (rows.mT if transposed else rows)]

    @staticmethod
    def shuffle(x, distance):
        return Number(x.each[_LANE ^ distance])

    @staticmethod
    def fused(total, factors):
        return Number(np.float32(np.multiply(*(np.float64(x.each) for x in factors)) + total.each))

    @staticmethod
    def shuffle_up(x, step):
        return Number(x.each[np.maximum(_LANE - step, 0)])

    @staticmethod
    def popcount(x):
        return Number(np.bitwise_count(x.each.astype(np.uint32)).astype(np.int64))

    @staticmethod
    def permuted(x, y, order):
        both = np.stack([z.each.astype(np.uint32) for z in (x, y)], 1).view(np.uint8)
        return _packed(np.stack([both[:, order >> 4 * i & 7] for i in range(4)], 1).view(np.uint16))

    @staticmethod
    def transposed(x):
        return _packed(_parted(x, np.uint16).reshape(8, 8).T.reshape(LANES, 2))

    @staticmethod
    def least(x, y):
        return Number(np.minimum(x.each, y))

    def meet_warp(self):
        """Do what was stored since the last barrier, in the other order: a compiler may change it."""
        for at, written in reversed(self.stores):
            for place, x in zip(at, written.view(np.uint8), strict=True):
                self.memory[place:][: x.size] = x
        self.stores.clear()

    def store_shared(self, to, numbers, where, offset=0):
        mine = slice(None) if where is None else where.each
        self.stores.append(((to.each + offset)[mine], np.stack([x.each for x in numbers], 1).astype(np.int32)[mine]))

    def address(self, x):  # each array has a terabyte of global memory
        self.arrays.append(np.asarray(x).tobytes())
        return Number(np.int64(len(self.arrays)) << 40)

    def _bytes(self, place, size):
        return np.frombuffer(self.arrays[(place >> 40) - 1], np.uint8, size, place & ((1 << 40) - 1))

    def load_int(self, place, kind="b32"):
        return Number(np.array([int.from_bytes(self._bytes(x, 4 if kind == "b32" else 1), "little") for x in place.each]))

    def copy_async(self, to, source, size, where, offset=0):
        for lane in np.flatnonzero(where.each):
            self.memory[to.each[lane] + offset :][:size] = self._bytes(source.each[lane], size)

    def store_half(self, to, x, offset):
        self.stores.append((to.each + offset, np.ascontiguousarray((x.each & 0xFFFF).astype(np.uint16)[:, None])))

    def unpack(self, word, place, half, channels, two):
        """Run the program of `warps.unpack`, see `computed`."""
        operands, text = [word.each & 0xFFFFFFFF, place.each], warps.unpacking(half, channels, two)
        return [Number(x) for x in computed(text, operands, channels // 2 + 1, self.memory)]

    @staticmethod
    def multiply(sums, left, right, dtype):
        tall, wide, out = np.zeros((2, 8, 2, 8)), np.zeros((2, 8, 8)), np.zeros((2, 8, 8))
        for i in (0, 1):
            for part in (0, 1):
                wide[part, _COLUMN + i, _ROW] = _parted(right[part], dtype)[:, i]
                out[part, _ROW, _COLUMN + i] = sums[2 * part + i].each
                for half in (0, 1):
                    tall[half, _ROW, part, _COLUMN + i] = _parted(left[2 * part + half], dtype)[:, i]
        out += np.einsum("hrpk,pkc->hrc", tall, wide)
        return [Number(out[half, _ROW, _COLUMN + i].astype(np.float32)) for half in (0, 1) for i in (0, 1)]


def computed(text, operands, results, memory):
    """Run the PTX of `warps.unpacking` on int64 [32] operands."""
    named = dict(enumerate([None] * results + operands))

    def value(x):
        return named[int(x[1:])] if x[0] == "$" else named[x] if x in named else np.int64(int(x, 0))

    def bytes_of(*words):
        return np.stack([np.broadcast_to(x, LANES) >> 8 * i & 255 for x in words for i in range(4)])

    def permuted(low, high, order):
        chosen = np.broadcast_to(order, LANES) >> 4 * np.arange(4)[:, None] & 15
        found = np.take_along_axis(bytes_of(low, high), chosen & 7, axis=0)
        return sum(x << 8 * i for i, x in enumerate(np.where(chosen < 8, found, (found >> 7) * 255)))

    meanings = {
        "mov": lambda x: x,
        "and": np.bitwise_and,
        "shr": np.right_shift,
        "shl": np.left_shift,
        "sub": np.subtract,
        "add": np.add,
        "or": np.bitwise_or,
        "setp": np.not_equal,
        "prmt": permuted,
        "dp4a": lambda x, y, z: (bytes_of(x) * bytes_of(y)).sum(axis=0) + z,
        "ld": lambda place: np.array([memory[x:][:4].view(np.uint32)[0] for x in place], np.int64),
    }
    for line in text.strip("{ }").split(";"):
        if (line := line.strip()) and not line.startswith(".reg"):
            guard, name, names = line.split(" ", 2) if line[0] == "@" else ("", *line.split(" ", 1))
            to, *given = (x.strip("[] ") for x in names.split(","))
            found = np.broadcast_to(meanings[name.split(".")[0]](*map(value, given)), LANES) & 0xFFFFFFFF
            found = np.where(named[guard[1:]], found, 0xBAD0BAD0) if guard else found
            named[int(to[1:]) if to[0] == "$" else to] = found
    return [named[i] for i in range(results)]


def _packed(two):
    """Make int32 numbers of two 16-bit numbers of each lane."""
    return Number(np.ascontiguousarray(two).view(np.int32)[:, 0].astype(np.int64))


def _parted(x, dtype):
    return x.each.astype(np.int32).view(np.uint16).reshape(LANES, 2).view(dtype)
