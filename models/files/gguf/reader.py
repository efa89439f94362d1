"""Open a GGUF file: its metadata, and its tensors, which stay in the file until they are read."""

import dataclasses
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .header import TensorInfo, parse

_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf")  # the end of a name that llama.cpp gives to the parts of a split file
_CHUNK = 1 << 20  # values that are decoded at once
_TYPES = {  # types of metadata that any file can have; config.py checks the metadata of an architecture
    **dict.fromkeys((
        "general.architecture", "general.type", "tokenizer.chat_template", "tokenizer.ggml.model", "tokenizer.ggml.pre",
    ), str),
    **dict.fromkeys((
        "tokenizer.chat_templates", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
        "tokenizer.ggml.scores",
    ), list),
    **dict.fromkeys((
        "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix",
    ), bool), "split.count": int,
}  # fmt: skip
_TEXTS = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_templates")  # lists of texts


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
    """An open GGUF file.

    Attributes:
        path: the file.
        metadata: numbers, bools, texts, and lists of numbers, bools or texts, by key.
        tensors: where the tensors are, by their names in the file.
        data: the mapped file, uint8 [N].
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    data: np.ndarray

    def read(self, name: str, dtype: np.dtype, index: int | None = None) -> np.ndarray:
        """Read the values of a tensor in ``dtype``, decoded a few rows at a time, without a float32 copy of the tensor.

        Args:
            name: of the tensor.
            dtype: of the values that are returned.
            index: of a stack [E, out, in], the matrix to read alone; None reads the whole tensor.
        """
        tensor = self.tensors[name]
        shape, blocks = tensor.shape, self.data[tensor.begin : tensor.begin + tensor.size]
        if index is not None:
            shape, blocks = shape[1:], blocks.reshape(shape[0], -1)[index]
        out = np.empty((math.prod(shape[:-1]), *shape[-1:]), dtype)
        blocks = blocks.reshape(len(out), -1)
        rows = max(1, _CHUNK * len(out) // max(1, out.size))
        factors = self._factors(name, index)
        try:
            for start in range(0, len(out), rows):
                values = gguf.dequantize(blocks[start : start + rows], tensor.kind)
                out[start : start + rows] = values if factors is None else values * factors[start : start + rows]
        except NotImplementedError as error:
            kind = tensor.kind.name
            raise ValueError(f"{self.path}: the package gguf cannot decode type {kind} of tensor {name}") from error
        return out.reshape(shape)

    def beside(self, name: str) -> tuple[str, ...]:
        """Name the tensors that belong to the codes of a tensor in NVFP4: a factor, and a scale for coded activations."""
        if self.tensors[name].kind != gguf.GGMLQuantizationType.NVFP4:
            return ()
        names = (f"{name.removesuffix('.weight')}.{end}" for end in ("scale", "input_scale"))
        return tuple(other for other in names if other in self.tensors)

    def _factors(self, name: str, index: int | None) -> np.ndarray | None:
        """Read the factor of each row of a tensor, float32 [rows, 1], one number for a matrix; None without factors."""
        factor = next((other for other in self.beside(name) if other.endswith(".scale")), None)
        if factor is None:
            return None
        shape = self.tensors[name].shape
        matrices = shape[0] if len(shape) > 2 else 1
        values = self.read(factor, np.dtype(np.float32)).reshape(-1)
        if values.size not in (1, matrices):
            raise ValueError(f"{self.path}: {factor} has {values.size} numbers, expected one for each of {matrices} matrices")
        values = np.broadcast_to(values, matrices)
        values = values if index is None else values[index : index + 1]
        return np.repeat(values, math.prod(shape[:-1]) // matrices)[:, None]


def open_file(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file of version 2 or 3."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file {path}")
    # An empty file cannot be mapped.
    data = np.memmap(path, np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    try:
        metadata, tensors = parse(data)
    except ValueError as error:
        beside = (path.parent / "config.json").is_file()
        hint = f"; for the model beside it pass the directory {path.parent}" if beside else ""
        raise ValueError(f"{path} {error}{hint}") from error
    for key, value in metadata.items():
        expected = int if key.endswith("_token_id") else _TYPES.get(key)
        items = {type(item) for item in value} if key in _TEXTS and type(value) is list else set()
        if (expected is not None and type(value) is not expected) or items - {str}:
            raise ValueError(f"{path}: metadata {key} has the wrong type, got {str(value)[:40]}")
    if metadata.get("split.count", 1) > 1 or _PART.search(path.name):
        raise ValueError(
            f"{path} is one part of a split GGUF file, expected a whole one: join the parts first, for example with "
            "llama.cpp's llama-gguf-split --merge"
        )
    return GGUFFile(path, metadata, tensors, data)
