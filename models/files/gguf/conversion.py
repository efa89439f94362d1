"""Conversion of a GGUF file to a directory in Hugging Face layout."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...sizes.architecture import HOST_DTYPES, Architecture, check_dtype
from ..hf import config as hf_config
from ..tables.checkpoint import checkpoint_table
from .config import read_config
from .reader import GGUFFile, open_file
from .tensors import GGUFTensors
from .tokenizer import build_tokenizer, chat_templates, special_tokens

Progress = Callable[[int, int], None]
_KEPT = 50  # characters of the directory's name in the temporary name, which must not be too long
_FILE_DTYPES = {"float32": "F32", "bfloat16": "BF16"}  # as safetensors names them


def convert(
    gguf_path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    dtype: str = "bfloat16",
    progress: Progress | None = None,
) -> Path:
    """Write the model of a GGUF file as a Hugging Face directory, which transformers can read too.

    The directory gets ``config.json``, ``model.safetensors``, ``tokenizer.json`` and ``tokenizer_config.json`` with the chat
    template. One tensor at a time is in memory. The files are written to a temporary directory beside ``directory``, which
    is renamed at the end: ``directory`` is whole or absent.

    Args:
        gguf_path: the file.
        directory: must not exist; its parent is created.
        dtype: dtype of the weights, "float32" or "bfloat16".
        progress: called with the bytes of weights written so far and the bytes of all weights, at the start and after each
            tensor.

    Returns:
        ``directory``.
    """
    directory = Path(directory)
    check_dtype(dtype)
    if directory.exists():
        raise FileExistsError(f"{directory} exists already; it is not written over")
    file = open_file(gguf_path)
    config = read_config(file, dtype)
    tensors = GGUFTensors.of(file, config, checkpoint_table(config))
    build_tokenizer(file)  # refuses a kind that is not supported before anything is written
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name[:_KEPT]}-", dir=directory.parent))
    try:
        _write_json(scratch / "config.json", hf_config.write(vars(config)))
        save_tokenizer(file, scratch)
        _write_weights(scratch / "model.safetensors", tensors, config, progress or (lambda done, total: None))
        scratch.chmod(0o755)  # a temporary directory is closed to other users
        os.rename(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tokenizer(file: GGUFFile, directory: Path) -> None:
    """Write the tokenizer of a GGUF file as ``tokenizer.json``, with ``tokenizer_config.json`` and its chat template."""
    tokenizer = build_tokenizer(file)
    _write_json(directory / "tokenizer_config.json", _tokenizer_config(file, read_config(file)))
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")


def _tokenizer_config(file: GGUFFile, config: Architecture) -> dict[str, Any]:
    """Build the ``tokenizer_config.json`` of a file: special tokens and chat templates."""
    templates = chat_templates(file)
    about: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        **special_tokens(file),
    }
    if list(templates) == ["default"]:
        about["chat_template"] = templates["default"]
    elif templates:
        about["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return about


def _write_weights(path: Path, tensors: GGUFTensors, config: Architecture, progress: Progress) -> None:
    """Write ``model.safetensors`` one tensor after the other: the size of a JSON header, the header, and the data.

    Source: the description of the format in the safetensors repository.
    """
    dtype = HOST_DTYPES[config.dtype]
    shapes = {name: leaf.file_shape(i) for leaf in checkpoint_table(config) for i, name in enumerate(leaf.names)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * math.prod(shape)
        header[name] = {"dtype": _FILE_DTYPES[config.dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        progress(0, end)
        for name in shapes:
            stream.write(memoryview(np.ascontiguousarray(tensors.read(name, dtype)).view(np.uint8)))
            progress(header[name]["data_offsets"][1], end)
