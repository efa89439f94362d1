"""The few instructions of PTX that some kernels use: NumPy runs one statement at a time, for all threads of a program."""

import itertools
import re

import numpy as np

WARP = 32
_START = 0x400  # where the shared memory of a program may begin


class Threads:
    """Threads with shared memory, which begins with random bits.

    Args:
        count: of the threads.
        words: of shared memory.
    """

    def __init__(self, count, words):
        self.count = count
        self.memory = np.random.default_rng(0).integers(0, 1 << 32, words, np.uint32)
        self.writes = np.zeros(words, int)

    def run(self, program, results, *operands):
        """Run a program with lists of ``operands``, numbers of 32 bits [T]: its ``results`` uint32 [T]."""
        given = [np.array(x).view(np.uint32) for x in itertools.chain(*operands)]
        self.registers = {f"${results + i}": x for i, x in enumerate(given)}
        for text in program.strip("{}").split(";"):
            if (text := text.strip()) and not text.startswith("."):
                self._statement(text)
        return [self.registers[f"${i}"] for i in range(results)]

    def _value(self, name):
        if name in self.registers:
            return self.registers[name]
        if name == "%laneid":
            return np.arange(self.count, dtype=np.uint32) % WARP
        number = _START if name == "global_smem" else int(name, 0)
        return np.full(self.count, number, np.uint32)

    def _statement(self, text):
        held, operation, rest = re.fullmatch(r"(?:@(\w+) )?(\S+) (.*)", text).groups()
        names = re.findall(r"[$%\w]+", rest)
        if operation == "bar.sync":
            return
        if operation == "st.shared.b32":
            here = np.ones(self.count, bool) if held is None else self.registers[held]
            base, offset, source = names
            at = self._index(base, offset, here)
            self._one_bank(at, here)
            self.memory[at] = self._value(source)[here]
            np.add.at(self.writes, at, 1)
            return
        target, *given = names
        if operation == "mov.b32" and "{" in rest:
            if rest.startswith("{"):  # a word becomes two numbers of 16 bits
                word = self._value(given[1])
                self.registers[target], self.registers[given[0]] = word & 0xFFFF, word >> 16
            else:
                self.registers[target] = self._value(given[0]) | self._value(given[1]) << 16
            return
        if operation == "ld.shared.f32":
            every = np.ones(self.count, bool)
            at = self._index(*given, every)
            self._one_bank(at, every)
            self.registers[target] = self.memory[at]
            return
        if operation == "shfl.sync.bfly.b32":
            source, lanes = self._value(given[0]).reshape(-1, WARP), np.arange(WARP)
            self.registers[target] = source[:, lanes ^ int(given[1])].reshape(self.count)
            return
        a, *more = map(self._value, given)
        self.registers[target] = {
            "mov.b32": lambda: a,
            "mov.u32": lambda: a,
            "mov.f32": lambda: a,
            "setp.ge.s32": lambda: a.view(np.int32) >= more[0].view(np.int32),
            "setp.ne.s32": lambda: a != more[0],
            "selp.f32": lambda: np.where(more[1], a, more[0]),
            "and.b32": lambda: a & more[0],
            "add.s32": lambda: a + more[0],
            "mad.lo.s32": lambda: a * more[0] + more[1],
            "set.eq.f16x2.f16x2": lambda: (a.view(np.float16) == more[0].view(np.float16)).astype(np.float16).view(np.uint32),
            "add.rn.f16x2": lambda: (a.view(np.float16) + more[0].view(np.float16)).view(np.uint32),
            "prmt.b32": lambda: _bytes(a, more[0], int(given[2], 0)),
            "add.f32": lambda: (a.view(np.float32) + more[0].view(np.float32)).view(np.uint32),
        }[operation]()

    def _index(self, register, offset, here):
        at = self.registers[register][here].astype(np.int64) + int(offset) - _START
        assert np.all((at % 4 == 0) & (at >= 0))
        return at // 4

    @staticmethod
    def _one_bank(at, here):
        warp = np.flatnonzero(here) // WARP
        banks = set(zip(warp.tolist(), (at % WARP).tolist(), strict=True))
        assert len(banks) == len(at), "two threads of a warp need one bank"


def _bytes(low, high, selector):
    """The bytes of two words that the digits of ``selector`` name."""
    found = np.stack([word >> np.uint32(8 * i) & np.uint32(0xFF) for word in (low, high) for i in range(4)])
    return sum(found[selector >> 4 * i & 7] << np.uint32(8 * i) for i in range(4))


def words_of(data):
    """Bytes uint8 [T, 4 * N] as N registers uint32 [T]."""
    return list(np.ascontiguousarray(data).view(np.uint32).T)
