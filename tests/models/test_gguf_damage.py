"""Damaged and foreign GGUF files: each is one ValueError that says what was got, in little time and memory."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

import models
from models import gguf_files
from models.gguf_files.header import parse
from tests.models import gguf_writing
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny model's file: its path, metadata and tensors."""
    path = write_tiny_gguf(tmp_path_factory.mktemp("gguf"))
    file = gguf_files.open_file(path)
    return path, dict(file.metadata), {name: file.read(name, np.dtype(np.float32)) for name in file.tensors}


def test_a_file_cut_anywhere_is_refused(whole, tmp_path):
    path, _, _ = whole
    data = path.read_bytes()
    first = min(tensor.begin for tensor in gguf_files.open_file(path).tensors.values())
    cuts = [0, 3, 4, 7, 8, 15, 16, 23, 24, 31, 40, 200, first // 2, first - 1, first, first + 1, len(data) - 1]
    for size in cuts:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(ValueError, match=r"cut\.gguf is (not a GGUF file|truncated)"):
            gguf_files.open_file(tmp_path / "cut.gguf")


def test_big_endian_and_other_versions_are_refused(whole, tmp_path):
    path, values, tensors = whole
    gguf_writing.write(tmp_path / "big.gguf", values, tensors, endian=gguf.GGUFEndian.BIG)
    with pytest.raises(ValueError, match="big-endian GGUF file, expected a little-endian one"):
        gguf_files.open_file(tmp_path / "big.gguf")
    for version in (1, 4, 2**31):
        (tmp_path / "v.gguf").write_bytes(b"GGUF" + struct.pack("<I", version) + path.read_bytes()[8:])
        with pytest.raises(ValueError, match=f"of version {version}, expected version 2 or 3"):
            gguf_files.open_file(tmp_path / "v.gguf")


def text(value):
    return struct.pack("<Q", len(value)) + value


@pytest.mark.parametrize(
    ("counts", "body", "message"),
    [
        ((2**63, 0), b"", "truncated"),  # tensors that are not there
        ((0, 2**63), b"", "truncated"),  # keys that are not there
        ((0, 1), struct.pack("<Q", 2**62), "truncated"),  # a text that is longer than any file
        ((0, 1), text(b"k") + struct.pack("<IIQ", 9, 4, 2**62), "truncated"),  # a list of numbers
        ((0, 1), text(b"k") + struct.pack("<IIQ", 9, 8, 2**62), "truncated"),  # a list of texts
        ((0, 1), text(b"k") + struct.pack("<IIQ", 9, 9, 1)[:4] + struct.pack("<IQ", 9, 1) * 5000, "lists in lists"),
        ((0, 1), text(b"k") + struct.pack("<I", 77), "unknown type 77"),
        ((0, 1), text(b"\xff") + struct.pack("<II", 4, 1), "not UTF-8"),
        ((1, 0), text(b"t") + struct.pack("<I", 2**31), "truncated"),  # a tensor of so many axes
        ((1, 0), text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0), "truncated"),  # of so many numbers
        ((1, 0), text(b"t") + struct.pack("<IQIQ", 1, 32, 999, 0), "unknown type 999"),
        ((1, 0), text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0), "no whole blocks of 32"),
        ((2, 0), 2 * (text(b"t") + struct.pack("<IQIQ", 1, 32, 0, 0)), "stands there twice"),
    ],
)
def test_claims_of_a_header_cost_nothing(counts, body, message):
    data = b"GGUF" + struct.pack("<IQQ", 3, *counts) + body
    with pytest.raises(ValueError, match=message):
        parse(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("other", ["x", 1.5, True, [1, "a"], 7], ids=repr)
def test_metadata_of_a_wrong_type_is_named(whole, other):
    """Any key of any other type: what reads it says so, or does not need it."""
    path, values, _ = whole
    for key, value in values.items():
        if key == "general.architecture" or type(other) is type(value):
            continue
        file = gguf_files.GGUFFile(path, {**values, key: other}, gguf_files.open_file(path).tensors, np.empty(0))
        for read in (gguf_files.read_config, gguf_files.build_tokenizer, gguf_files.chat_templates):
            try:
                read(file)
            except ValueError as error:
                assert path.name in str(error) and len(str(error)) < 600, (key, other)


@pytest.mark.parametrize("key", ["llama.block_count", "llama.vocab_size", "llama.embedding_length", "llama.feed_forward_length"])
def test_sizes_that_the_file_does_not_hold(whole, tmp_path, key):
    """Before anything of the claimed size is made."""
    _, values, tensors = whole
    gguf_writing.write(tmp_path / "x.gguf", {**values, key: 2**32 - 1}, tensors)
    with pytest.raises(ValueError, match=str(2**32 - 1)):
        models.from_pretrained(tmp_path / "x.gguf")


def test_types_that_cannot_be_decoded_are_named(tmp_path):
    """The package gguf knows the sizes of blocks of all types, and how to decode most."""
    undecodable = [
        kind for kind in gguf.GGMLQuantizationType
        if kind.name not in ("F32", "F16") and kind not in gguf.quants._type_traits
    ]  # fmt: skip
    assert undecodable
    for kind in undecodable:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        info = struct.pack("<IQIQ", 1, block, kind.value, 0)
        data = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text(b"t") + info
        (tmp_path / "x.gguf").write_bytes(data + bytes(-len(data) % 32 + size))
        with pytest.raises(ValueError, match=f"cannot decode type {kind.name} of tensor t"):
            gguf_files.open_file(tmp_path / "x.gguf").read("t", np.dtype(np.float32))


def test_files_beside_a_model(whole, tmp_path):
    """A directory of two files, and a file of a directory in Hugging Face layout."""
    path, _, _ = whole
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"holds 2 GGUF files, expected one; pass the path of one of: a\.gguf, b\.gguf"):
        models.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is not a GGUF file: .*for the model beside it pass the directory .*hf"):
        models.from_pretrained(path.parent / "hf" / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"tiny\.gguf is a file, expected a model's directory"):
        models.checkpoint_directory(path)
