"""PTX of Mosaic GPU kernels in NumPy: what `arrays.assembly` runs, for the 128 threads of a warpgroup.

Threads that have branched apart wait for the one that is farthest behind. Registers hold bits, as uint64.
"""

import functools
import operator
import re

import numpy as np

THREADS, SHIFT = 128, np.uint64(32)
COMPARE = {x: getattr(operator, x) for x in ("eq", "ne", "lt", "le", "gt", "ge")}
_LANE = np.arange(THREADS) % 32
_WARP = np.arange(THREADS) - _LANE


def _bits(x, size=8):
    x = np.asarray(x)
    return x.view(np.uint32).astype(np.uint64) if x.dtype == np.float32 else x.astype(np.int64).view(np.uint64)


def _read(bits, kind):
    """The numbers of type ``kind`` that bits are."""
    if kind == "f32":
        return bits.astype(np.uint32).view(np.float32)
    size = int(kind[1:])
    if size == 64:
        return bits.view(np.int64) if kind[0] == "s" else bits
    low = bits & np.uint64((1 << size) - 1)
    return low.astype(np.uint32).view(np.int32).astype(np.int64) if kind == "s32" else low.astype(np.int64)


def _parts(text):
    """Split operands at commas that are not in braces."""
    return [x.strip() for x in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", text)]


@functools.cache
def _program(text):
    """List instructions (predicate, operation, operands) and where labels are."""
    steps, labels = [], {}
    for line in filter(None, map(str.strip, text.split(";"))):
        while found := re.match(r"([A-Z]+):\s*", line):
            labels[found[1]], line = len(steps), line[found.end() :]
        where, line = re.match(r"(?:@(\w+) )?(.*)", line).groups("")
        name, _, rest = line.partition(" ")
        if not name.startswith(".reg"):
            steps.append((where, name.split("."), _parts(rest)))
    return steps, labels


class Threads:
    """The threads of a warpgroup, the ``team`` of its program.

    ``memory(address, shared)`` returns bytes and an offset; ``meet`` waits for all threads of the program.
    """

    def __init__(self, team, memory, meet):
        self.memory, self.meet = memory, meet
        self.special = {"%tid.x": team * THREADS + np.arange(THREADS), "%laneid": _LANE}

    def run(self, text, operands, kinds):
        """Run instructions, and return their results, of types ``kinds``."""
        steps, labels = _program(text)
        operands = (_bits(x) for x in operands)
        self.held = {f"${i + len(kinds)}": np.array(np.broadcast_to(x, (THREADS,))) for i, x in enumerate(operands)}
        at = np.zeros(THREADS, int)
        while (now := at.min()) < len(steps):
            here = at == now
            where, name, args = steps[now]
            shown = here & self.held[where] if where else here
            at = np.where(here, now + 1, at)
            if name[0] == "bra":
                at = np.where(shown, labels[args[0]], at)
            elif shown.any():
                self._step(name, args, shown)
        found = [_read(self.held[f"${i}"], kind) for i, kind in enumerate(kinds)]
        return [x if kind == "f32" else x.astype(np.int32) for x, kind in zip(found, kinds, strict=True)]

    def _value(self, text, kind):
        if text in self.special:
            return self.special[text]
        if text.startswith("0f"):
            return np.full(THREADS, np.uint32(int(text[2:], 16)).view(np.float32))
        if re.match(r"-?\d", text):
            return _read(_bits(np.full(THREADS, int(text, 0))), kind)
        return _read(self.held[text], kind)

    def _put(self, name, x, shown):
        x = x if x.dtype == bool else _bits(x)
        old = self.held.get(name, np.zeros_like(x))
        self.held[name] = np.where(shown, x, old)

    def _step(self, name, args, shown):
        op, kind = name[0], name[-1]
        if op in ("ld", "st", "red"):
            return self._access(op, name, args, shown)
        if op == "barrier":
            return self.meet()
        if op == "mov" and args[-1][0] == "{":
            low, high = (self._value(x, "u32").astype(np.uint64) for x in args[1][1:-1].split(", "))
            return self._put(args[0], (low | high << SHIFT).view(np.int64), shown)
        if op == "mapa":
            return self._put(
                args[0], self._value(args[1], "u32") % (1 << 24) + ((self._value(args[2], "u32") + 1) << 24), shown
            )
        if op == "setp":
            x, y = (self._value(a, kind) for a in args[1:3])
            found = COMPARE[name[1]](x, y)
            return self._put(args[0], np.asarray(found & self.held[args[3]] if len(args) > 3 else found), shown)
        if op == "or" and kind == "pred":
            return self._put(args[0], self.held[args[1]] | self.held[args[2]], shown)
        if op in ("shfl", "redux"):
            return self._across(op, name, args, shown)
        wide = name[1] == "wide"
        given = [self._value(a, kind if not (wide and i == 2) else "s64") for i, a in enumerate(args[1:])]
        found = getattr(self, f"_{op}")(*given) if op != "cvt" else self._cvt(name, args)
        kept = kind if not wide and op != "cvt" else ""
        self._put(args[0], _read(_bits(found), kept) if kept.endswith("32") and kept != "f32" else found, shown)

    _mov = staticmethod(lambda x: x)
    _add, _sub, _mul, _and, _or, _xor = (
        staticmethod(getattr(operator, x)) for x in ("add", "sub", "mul", "and_", "or_", "xor")
    )
    _min, _max, _neg = staticmethod(np.minimum), staticmethod(np.maximum), staticmethod(operator.neg)
    _shl, _shr = staticmethod(lambda x, n: x << n), staticmethod(lambda x, n: x >> n)
    _mad = staticmethod(lambda x, y, z: x * y + z)

    @staticmethod
    def _fma(x, y, z):
        return (x.astype(np.float64) * y + z).astype(np.float32)

    def _cvt(self, name, args):
        x = self._value(args[1], name[-1])
        return x.astype(np.float32) if name[-2] == "f32" else np.trunc(x).astype(np.int64)

    @staticmethod
    def _prmt(x, y, choice):
        source = [(z >> (8 * i)) & 255 for z in (x, y) for i in range(4)]
        picked = [np.select([((choice >> 4 * i) & 7) == j for j in range(8)], source) for i in range(4)]
        signs = [(choice >> (4 * i + 3)) & 1 for i in range(4)]
        return sum(
            np.where(s, np.where(z > 127, 255, 0), z) << (8 * i) for i, (z, s) in enumerate(zip(picked, signs, strict=True))
        )

    @staticmethod
    def _lop3(x, y, z, table):
        found = 0
        for i in range(8):
            terms = [v if i >> (2 - k) & 1 else ~v for k, v in enumerate((x, y, z))]
            found = found | np.where(table >> i & 1, terms[0] & terms[1] & terms[2], 0)
        return found

    @staticmethod
    def _dp4a(x, y, z):
        return sum(((x >> 8 * i) & 255) * ((y >> 8 * i) & 255) for i in range(4)) + z

    def _across(self, op, name, args, shown):
        assert shown.all(), "got a shuffle of some threads, expected all"
        x = self._value(args[1], "s32" if op == "redux" else "u32")
        if op == "redux":
            fold = {"add": np.sum, "max": np.max, "min": np.min}[name[2]]
            return self._put(args[0], np.repeat(fold(x.reshape(-1, 32), axis=1), 32), shown)
        by = self._value(args[2], "u32")
        lane = {"idx": by & 31, "up": _LANE - by, "down": _LANE + by, "bfly": _LANE ^ by}[name[2]]
        return self._put(args[0], x[_WARP + np.where((lane < 0) | (lane > 31), _LANE, lane)], shown)

    def _access(self, op, name, args, shown):
        kind, many = name[-1], next((int(x[1:]) for x in name if re.fullmatch(r"v\d", x)), 1)
        target, data = (args[1], args[0]) if op == "ld" else (args[0], args[1])
        base, _, offset = target[1:-1].partition(" + ")
        shared = name[1].startswith("shared")
        place = self._value(base, "u32" if shared else "u64").astype(np.int64) + int(offset or 0)
        names, size = re.findall(r"[^{},\s]+", data), int(kind[1:]) // 8
        for i, x in enumerate(names):
            assert len(names) == many and (place[shown] % (size * many) == 0).all(), f"got places {place[shown]} for {name}"
            held = self._value(x, "u32") if op != "ld" else np.zeros(THREADS, np.int64)
            for thread in np.flatnonzero(shown):
                memory, at = self.memory(int(place[thread]) + i * size, shared)
                assert 0 <= at <= len(memory) - size, f"got {at} of {len(memory)} bytes for {name}"
                view = memory[at : at + size].view(f"u{size}")
                if op == "ld":
                    held[thread] = view[0]
                else:
                    view[0] = held[thread] + (view[0] if op == "red" else 0)
            if op == "ld":
                self._put(x, held, shown)
