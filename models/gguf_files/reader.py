"""Find and open a GGUF file: its metadata and its tensors, which stay in the file until somebody reads them."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..hub import checkpoint_directory

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf")  # the end of a name that llama.cpp gives to the parts of a split file
_CHUNK = 1 << 22  # numbers that are decoded at once


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file. Its tensors are views of the mapped file.

    Attributes:
        path: the file.
        fields: metadata by key, as the package ``gguf`` holds it.
        tensors: tensors by their names in the file.
    """

    path: Path
    fields: Mapping[str, gguf.ReaderField]
    tensors: Mapping[str, gguf.ReaderTensor]

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata under ``key``: a number, a bool, a text, or a list of these. ``default`` if the file lacks it."""
        field = self.fields.get(key)
        return default if field is None else field.contents()

    def length(self, key: str) -> int | None:
        """The number of entries of the array under ``key``, or None if the file lacks it."""
        field = self.fields.get(key)
        return None if field is None else len(field.data)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, slowest axis first: [out, in] for a matrix. The file lists the axes in reverse."""
        return tuple(int(size) for size in reversed(self.tensors[name].shape))

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """The numbers of a tensor in ``dtype``, decoded a few rows at a time. So no float32 copy of it exists.

        Raises:
            ValueError: the package ``gguf`` cannot decode the tensor's type.
        """
        tensor = self.tensors[name]
        out = np.empty(self.shape(name), dtype)
        rows = max(1, _CHUNK * len(out) // max(1, out.size)) if out.ndim else 1
        try:
            for start in range(0, len(out), rows):
                block = tensor.data[start : start + rows]
                out[start : start + rows] = gguf.dequantize(block, tensor.tensor_type).reshape(-1, *out.shape[1:])
        except NotImplementedError as error:
            raise ValueError(
                f"{self.path}: tensor {name} has the type {tensor.tensor_type.name}, which the package gguf cannot decode"
            ) from error
        return out


def locate(checkpoint: str | os.PathLike) -> Path | None:
    """The GGUF file that a checkpoint is or holds, or None if the checkpoint is a directory in Hugging Face layout.

    Args:
        checkpoint: a file; a directory; or the name of a repository, see `models.checkpoint_directory`. A directory with a
            ``config.json`` is in Hugging Face layout, whatever else it holds.

    Raises:
        FileNotFoundError: there is no such file or directory.
        ValueError: the directory holds several GGUF files.
    """
    path = Path(checkpoint)
    if path.is_file():
        return path
    if path.suffix == ".gguf" and not path.is_dir():
        raise FileNotFoundError(f"no GGUF file {path}")
    directory = checkpoint_directory(checkpoint)
    if (directory / "config.json").is_file():
        return None
    found = sorted(directory.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{directory} holds {len(found)} GGUF files, expected one; pass the path of one of: {names}")
    return found[0] if found else None


def open_file(path: str | os.PathLike) -> GGUFFile:
    """Open a GGUF file of version 2 or 3.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no GGUF file, big-endian, of another version, one part of a split file, truncated or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file {path}")
    _check_header(path)
    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, TypeError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} is truncated or damaged: its {size} bytes end too early ({error})") from error
    file = GGUFFile(path, reader.fields, {tensor.name: tensor for tensor in reader.tensors})
    parts = file.value("split.count", 1)
    if parts > 1 or _PART.search(path.name):
        raise ValueError(
            f"{path} is one part of a split GGUF file ({parts} parts), expected a whole one: join the parts first, "
            "for example with llama.cpp's llama-gguf-split --merge"
        )
    return file


def _check_header(path: Path) -> None:
    """Refuse what is no little-endian GGUF file of a known version."""
    with path.open("rb") as stream:
        header = stream.read(8)
    if header[:4] != _MAGIC:
        raise ValueError(f"{path} is not a GGUF file: it begins with {header[:4]!r}, expected {_MAGIC!r}")
    if len(header) < 8:
        raise ValueError(f"{path} is truncated: got {len(header)} bytes")
    version = int.from_bytes(header[4:], "little")
    if version in _VERSIONS:
        return
    if int.from_bytes(header[4:], "big") in _VERSIONS:
        raise ValueError(f"{path} is a big-endian GGUF file, expected a little-endian one")
    versions = " or ".join(map(str, _VERSIONS))
    raise ValueError(f"{path} is a GGUF file of version {version}, expected version {versions}")
