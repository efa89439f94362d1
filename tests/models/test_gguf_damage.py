"""What a damaged GGUF file claims, and metadata of any wrong type: one ValueError, in little time and memory."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest

import models
from models.files import gguf as gguf_files
from models.files.gguf.header import parse
from tests.models.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny model's file."""
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf"))


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
        ((2, 0), 2 * (text(b"t") + struct.pack("<IQIQ", 1, 32, 0, 0)), "has the tensor t twice"),
    ],
)
def test_claims_of_a_header_cost_nothing(counts, body, message):
    data = b"GGUF" + struct.pack("<IQQ", 3, *counts) + body
    with pytest.raises(ValueError, match=message):
        parse(np.frombuffer(data, np.uint8))


@pytest.mark.parametrize("other", ["x", 1.5, True, [1, "a"], 7], ids=repr)
def test_metadata_of_a_wrong_type_is_named(whole, other, monkeypatch):
    """Any key of any other type: what reads it says so, or does not need it."""
    metadata, tensors = parse(np.fromfile(whole, np.uint8))
    for key, value in metadata.items():
        changed = {**metadata, key: value if type(other) is type(value) else other}
        monkeypatch.setattr(gguf_files.reader, "parse", lambda data, changed=changed: (changed, tensors))
        for read in (gguf_files.read_config, gguf_files.build_tokenizer, gguf_files.chat_templates):
            try:
                read(gguf_files.open_file(whole))
            except ValueError as error:
                assert whole.name in str(error) and len(str(error)) < 600, (key, other)


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


def test_files_that_are_no_directory(whole):
    """A file of a directory in Hugging Face layout, and a GGUF file where only a directory will do."""
    with pytest.raises(ValueError, match=r"is not a GGUF file: .*for the model beside it pass the directory .*hf"):
        models.from_pretrained(whole.parent / "hf" / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"tiny\.gguf is a file, expected a model's directory"):
        models.checkpoint_directory(whole)
