"""The few instructions of PTX that some kernels use: NumPy runs one statement at a time, for all threads of a program."""

from __future__ import annotations

import re

import numpy as np

WARP = 32
_START = 0x400  # where shared memory that a program declares may begin


class Threads:
    """Threads with their registers and shared memory, which begins with random bits.

    Args:
        operands: name to uint32, int32 or float32 [T], a register of each thread.
        words: of shared memory.
    """

    def __init__(self, operands, words):
        self.registers = {name: np.array(x).view(np.uint32) for name, x in operands.items()}
        self.count = len(next(iter(operands.values())))
        self.memory = np.random.default_rng(0).integers(0, 1 << 32, words, np.uint32)
        self.writes = np.zeros(words, int)

    def run(self, program):
        for text in program.strip("{}").split(";"):
            if (text := text.strip()) and not text.startswith("."):
                self._statement(text)

    def _value(self, name):
        if name in self.registers:
            return self.registers[name]
        if name == "%laneid":
            return np.arange(self.count, dtype=np.uint32) % WARP
        number = _START if name == "copies" else int(name, 0)
        return np.full(self.count, number, np.uint32)

    def _statement(self, text):
        held, operation, rest = re.fullmatch(r"(?:@(\w+) )?(\S+) (.*)", text).groups()
        names = re.findall(r"[$%\w]+", rest)
        if operation == "bar.sync":
            return
        if operation == "st.shared.v4.b32":
            here = self.registers[held]
            at = self._index(names[0])[here]
            assert np.all(at % 4 == 0)
            for i, name in enumerate(names[1:]):
                self.memory[at + i] = self._value(name)[here]
                np.add.at(self.writes, at + i, 1)
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
            at = self._index(given[0])
            assert np.all(at % WARP == np.arange(self.count) % WARP), "two threads of a warp look up in one bank"
            self.registers[target] = self.memory[at]
            return
        a, *more = map(self._value, given)
        self.registers[target] = {
            "mov.b32": lambda: a,
            "mov.u32": lambda: a,
            "setp.ge.s32": lambda: a.view(np.int32) >= more[0].view(np.int32),
            "xor.b32": lambda: a ^ more[0],
            "add.s32": lambda: a + more[0],
            "mad.lo.s32": lambda: a * more[0] + more[1],
            "prmt.b32": lambda: _byte(a, int(given[2], 0)),
            "set.eq.f16x2.f16x2": lambda: (a.view(np.float16) == more[0].view(np.float16)).astype(np.float16).view(np.uint32),
            "add.rn.f16x2": lambda: (a.view(np.float16) + more[0].view(np.float16)).view(np.uint32),
            "add.f32": lambda: (a.view(np.float32) + more[0].view(np.float32)).view(np.uint32),
        }[operation]()

    def _index(self, register):
        at = self.registers[register].astype(int) - _START
        assert np.all((at % 4 == 0) | (at < 0))
        return at // 4


def _byte(word, selector):
    """A byte of each word; the others become the lowest byte of a second operand, which is 0."""
    assert selector & 0xFFF0 == 0x4440
    return word >> np.uint32(8 * (selector & 15)) & np.uint32(0xFF)


def words_of(data):
    """Bytes uint8 [T, 4 * N] as N registers uint32 [T]."""
    return list(np.ascontiguousarray(data).view(np.uint32).T)
