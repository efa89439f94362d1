"""PTX of Mosaic GPU kernels in NumPy: what `assembly.run` does, for the 128 threads of a warpgroup.

Threads that have branched apart wait for the one that is farthest behind. Registers hold bits, as uint64.
"""

import functools
import operator
import re

import numpy as np

THREADS, BITS = 128, np.uint64(32)
_LANE = np.arange(THREADS) % 32
_WARP = np.arange(THREADS) - _LANE


def _whole(shown):
    """Tell whether all threads of a warp, or none, are shown."""
    return (shown == shown[_WARP]).all()


def _bits(x):
    x = np.asarray(x)
    return x.view(np.uint32).astype(np.uint64) if x.dtype == np.float32 else x.astype(np.int64).view(np.uint64)


def _read(bits, kind):
    """The numbers of type ``kind`` that bits are."""
    if kind[1:] == "64":
        return bits.view(np.int64) if kind[0] == "s" else bits
    low = bits.astype(np.uint32)
    return low.view(np.float32) if kind == "f32" else (low.view(np.int32) if kind[0] == "s" else low).astype(np.int64)


@functools.cache
def _program(text):
    """List instructions (predicate, operation, operands), and where labels are."""
    steps, labels = [], {}
    for line in filter(None, map(str.strip, text.split(";"))):
        while found := re.match(r"([A-Z]+):\s*", line):
            labels[found[1]], line = len(steps), line[found.end() :]
        where, line = re.match(r"(?:@(!?\w+) )?(.*)", line).groups("")
        name, _, rest = line.partition(" ")
        if name != ".reg":
            steps.append((where, name.split("."), [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)]))
    return steps, labels


def _prmt(x, y, choice):
    source, out = [(z >> (8 * i)) & 255 for z in (x, y) for i in range(4)], 0
    for i in range(4):
        digit = choice >> 4 * i
        byte = np.select([(digit & 7) == j for j in range(8)], source)
        out = out | np.where(digit & 8, np.where(byte > 127, 255, 0), byte) << (8 * i)
    return out


def _lop3(x, y, z, table):
    terms = [[v if i >> (2 - k) & 1 else ~v for k, v in enumerate((x, y, z))] for i in range(8)]
    return functools.reduce(operator.or_, (np.where(table >> i & 1, a & b & c, 0) for i, (a, b, c) in enumerate(terms)))


def _dp4a(x, y, z):
    return sum(((x >> 8 * i) & 255) * ((y >> 8 * i) & 255) for i in range(4)) + z


OPERATIONS = {x: getattr(operator, x) for x in ("add", "sub", "mul", "xor", "neg")} | {
    "and": operator.and_, "or": operator.or_, "shl": operator.lshift, "shr": operator.rshift, "min": np.minimum,
    "max": np.maximum, "mov": lambda x: x, "div": operator.floordiv,
    "mad": lambda x, y, z: x * y + z, "prmt": _prmt, "lop3": _lop3, "dp4a": _dp4a,
    "fma": lambda x, y, z: (x.astype(np.float64) * y + z).astype(np.float32),
    "popc": lambda x: np.bitwise_count(x).astype(np.int64), "bfind": lambda x: np.log2(np.maximum(x, 1)).astype(np.int64),
}  # fmt: skip


class Threads:
    """The threads of a warpgroup, the ``team`` of its program.

    ``memory(address, shared)`` returns bytes and an offset; ``meet`` waits for all threads of the program; ``lock`` keeps
    other warpgroups from memory that this one reads and writes.
    """

    def __init__(self, team, memory, meet, lock):
        self.memory, self.meet, self.lock = memory, meet, lock
        self.special = {"%tid.x": team * THREADS + np.arange(THREADS), "%laneid": _LANE}

    def run(self, text, operands, kinds):
        """Run instructions, and return their results, of types ``kinds``."""
        (steps, labels), at = _program(text), np.zeros(THREADS, int)
        self.held = {f"${i}": np.array(np.broadcast_to(_bits(x), (THREADS,))) for i, x in enumerate(operands, len(kinds))}
        while (now := at.min()) < len(steps):
            (where, name, args), here = steps[now], at == now
            shown = here & (self.held[where.lstrip("!")] ^ where.startswith("!")) if where else here
            at = np.where(here, now + 1, at)
            if name[0] == "bra":
                at = np.where(shown, labels[args[0]], at)
            elif name[0] == "barrier":
                self.meet()
            elif name[:3] == ["cp", "async", "cg"]:  # no later than its threads wait for it
                words = [f"copied{i}" for i in range(int(args[2]) // 4)]
                self._access("ld", "global", "b32", target=args[1], data=" ".join(words), shown=shown)
                self._access("st", "shared", "b32", target=args[0], data=" ".join(words), shown=shown)
            elif name[0] in ("bar", "cp", "prefetch"):
                continue
            elif name[0] == "mov" and args[0][0] == "{":
                for half, shift in zip(args[0][1:-1].split(", "), (0, 32), strict=True):
                    x = self.held[args[1]] >> np.uint64(shift) & np.uint64(2**32 - 1)
                    self.held[half] = np.where(shown, x, self.held.get(half, x))
            elif name[0] in ("ld", "st", "red"):
                with self.lock:
                    self._access(*name, target=args[name[0] == "ld"], data=args[name[0] != "ld"], shown=shown)
            elif shown.any():
                x = self._result(name, args, name[-1], shown)
                wide = "wide" in name or name[-1].endswith("64")
                x = x if x.dtype == bool else _bits(x) & np.uint64(2 ** (64 if wide else 32) - 1)
                self.held[args[0]] = np.where(shown, x, self.held.get(args[0], np.zeros_like(x)))
        found = [_read(self.held.get(f"${i}", np.zeros(THREADS, np.uint64)), kind) for i, kind in enumerate(kinds)]
        return [x if kind == "f32" else x.astype(np.int32) for x, kind in zip(found, kinds, strict=True)]

    def _value(self, text, kind="u32"):
        if text in self.special:
            return self.special[text]
        if text.startswith("0f"):
            return np.full(THREADS, np.uint32(int(text[2:], 16)).view(np.float32))
        return _read(_bits(np.full(THREADS, int(text, 0))) if re.match(r"-?\d", text) else self.held[text], kind)

    def _result(self, name, args, kind, shown):
        match name:
            case ["mov", "b64"] if args[1][0] == "{":
                low, high = (self._value(x).astype(np.uint64) for x in args[1][1:-1].split(", "))
                return low | high << BITS
            case ["mapa", *_]:
                return self._value(args[1]) % (1 << 24) + ((self._value(args[2]) + 1) << 24)
            case ["setp", compare, *_]:
                found = np.asarray(getattr(operator, compare)(*(self._value(x, kind) for x in args[1:3])))
                return getattr(operator, f"__{name[2]}__")(found, self.held[args[3]]) if len(args) > 3 else found
            case ["selp", kind]:
                return np.where(self.held[args[3]], *(self._value(x, kind) for x in args[1:3]))
            case ["or", "pred"]:
                return self.held[args[1]] | self.held[args[2]]
            case ["cvt", _, to, kind]:
                return self._value(args[1], kind).astype(np.float32 if to == "f32" else np.int64)
            case ["redux", _, fold, kind]:
                assert _whole(shown)
                return np.repeat(
                    getattr(np, {"add": "sum"}.get(fold, fold))(self._value(args[1], kind).reshape(-1, 32), axis=1), 32
                )
            case ["shfl", _, way, _]:
                assert _whole(shown)
                x, by = (self._value(x) for x in args[1:3])
                lane = {"idx": by & 31, "up": _LANE - by, "down": _LANE + by, "bfly": _LANE ^ by}[way]
                return x[_WARP + np.where((lane < 0) | (lane > 31), _LANE, lane)]
        wide = [kind if i < 2 else "s64" for i in range(3)] if name[1] == "wide" else [kind] * 4
        return OPERATIONS[name[0]](*(self._value(x, y) for x, y in zip(args[1:], wide, strict=False)))

    def _access(self, op, space, *how, target, data, shown):
        size, base, _, offset = int(how[-1][1:]) // 8, *target[1:-1].partition(" + ")
        names, shared = re.findall(r"[^{},\s]+", data), space.startswith("shared")
        place = self._value(base, "u32" if shared else "u64").astype(np.int64) + int(offset or 0)
        assert (place[shown] % (size * len(names)) == 0).all(), f"got places {place[shown]} for {op}.{space}.{how}"
        for i, x in enumerate(names):
            held = self._value(x) if op != "ld" else np.zeros(THREADS, np.int64)
            for thread in np.flatnonzero(shown):
                memory, at = self.memory(int(place[thread]) + i * size, shared)
                assert 0 <= at <= len(memory) - size, f"got {at} of {len(memory)} bytes for {op}.{space}.{how}"
                view = memory[at : at + size].view(f"u{size}")
                held[thread] = view[0] if op == "ld" else held[thread] + (view[0] if op == "red" else 0)
                view[0] = held[thread] if op != "ld" else view[0]
            if op == "ld":
                self.held[x] = np.where(shown, _bits(held), self.held.get(x, np.zeros(THREADS, np.uint64)))
