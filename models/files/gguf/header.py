"""The header of a GGUF file: its metadata, and where each tensor is.

The reader of the package ``gguf`` makes two arrays for every token and every merge, which takes seconds and 160 MB for 49,152
tokens. It also raises an IndexError for a truncated file. So the header is parsed here, and the package supplies the tensors'
types and their decoding.

Source: the GGUF specification (``docs/gguf.md`` in the ggml repository). All numbers are little-endian.
"""

import dataclasses
import math
import struct
from typing import Any

import gguf
import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_DEEPEST = 8  # lists in lists
_ALIGNMENT = 32  # bytes, alignment of the tensors' data where the metadata gives no other


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A tensor in the file.

    Attributes:
        shape: slowest axis first: [out, in] for a matrix. (The file lists the axes in reverse.)
        kind: type of the tensor's values or quantised blocks.
        begin: position of the tensor's first byte in the file.
        size: bytes of the tensor.
    """

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    begin: int
    size: int


def parse(data: np.ndarray) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Parse the bytes of a file, uint8 [N]: the metadata by key and the tensors by name.

    Messages of a ValueError continue a sentence that begins with the file's name: "is truncated: ...".
    """
    _check_start(data[:8].tobytes())
    cursor = _Cursor(data, 8)
    count, keys = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(keys):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"is damaged: it has the key {key} twice")
        metadata[key] = cursor.value(cursor.number("I"))
    listed = {}
    for _ in range(count):
        name = cursor.text()
        if name in listed:
            raise ValueError(f"is damaged: it has the tensor {name} twice")
        axes = [cursor.number("Q") for _ in range(cursor.number("I"))]
        listed[name] = (tuple(reversed(axes)), cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"is damaged: general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _tensor(name, shape, kind, start + offset) for name, (shape, kind, offset) in listed.items()}
    end = max((tensor.begin + tensor.size for tensor in tensors.values()), default=0)
    if end > len(data):
        raise ValueError(f"is truncated: got {len(data)} bytes, expected {end}")
    return metadata, tensors


def _check_start(start: bytes) -> None:
    """Refuse a file that does not begin as a little-endian GGUF file of a known version."""
    if start[:4] != _MAGIC:
        raise ValueError(f"is not a GGUF file: it begins with {start[:4]!r}, expected {_MAGIC!r}")
    version = int.from_bytes(start[4:], "little")
    if len(start) == 8 and version not in _VERSIONS:
        if int.from_bytes(start[4:], "big") in _VERSIONS:
            raise ValueError("is a big-endian GGUF file, expected a little-endian one")
        raise ValueError(f"is a GGUF file of version {version}, expected version {' or '.join(map(str, _VERSIONS))}")


def _tensor(name: str, shape: tuple[int, ...], kind: int, begin: int) -> TensorInfo:
    try:
        known = gguf.GGMLQuantizationType(kind)
    except ValueError as error:
        raise ValueError(f"is damaged or too new: the tensor {name} has the unknown type {kind}") from error
    block, size = gguf.GGML_QUANT_SIZES[known]
    if shape and shape[-1] % block:
        raise ValueError(f"is damaged: the tensor {name} {list(shape)} of type {known.name} has no whole blocks of {block}")
    return TensorInfo(shape, known, begin, math.prod(shape) // block * size)


class _Cursor:
    """A position in the bytes of a file, which moves past what it reads."""

    def __init__(self, data: np.ndarray, at: int):
        self.data, self.at = memoryview(data), at

    def take(self, size: int) -> memoryview:
        """Read the next ``size`` bytes."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise ValueError(f"is truncated: got {len(self.data)} bytes, expected more than {self.at}")
        return self.data[begin : self.at]

    def number(self, code: str) -> Any:
        """Read the next number, of the type that `struct` calls ``code``."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        """Read the next text."""
        try:
            return str(self.take(self.number("Q")), "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"is damaged: a text is not UTF-8 ({error})") from error

    def value(self, kind: int, depth: int = 0) -> Any:
        """Read the next value of metadata, of the type number ``kind``, inside ``depth`` lists."""
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            item, length = self.number("I"), self.number("Q")
            if item in _NUMBERS:
                return np.frombuffer(self.take(length * struct.calcsize("<" + _NUMBERS[item])), "<" + _NUMBERS[item]).tolist()
            if depth == _DEEPEST:
                raise ValueError(f"is damaged: the metadata has lists in lists, more than {_DEEPEST} deep")
            return [self.value(item, depth + 1) for _ in range(length)]
        if kind not in _NUMBERS:
            raise ValueError(f"is damaged: the metadata has a value of the unknown type {kind}")
        return self.number(_NUMBERS[kind])
