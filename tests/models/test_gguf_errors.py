"""Every way a GGUF file can be wrong: one clear ValueError that names the file."""

from __future__ import annotations

import struct
import time

import gguf
import numpy as np
import pytest

import models
from models.files import gguf as gguf_files
from models.files.directories import locate_gguf
from tests.models import gguf_writing
from tests.models.gguf_writing import QUANTS
from tests.models.test_gguf import golden

HF = {
    "model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64, "hidden_size": 32, "num_hidden_layers": 1,
    "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip
SHAPES = {
    "token_embd.weight": (8, 32), "output_norm.weight": (32,), "output.weight": (8, 32),
    "blk.0.attn_norm.weight": (32,), "blk.0.attn_q.weight": (32, 32), "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32), "blk.0.attn_output.weight": (32, 32), "blk.0.ffn_norm.weight": (32,),
    "blk.0.ffn_gate.weight": (32, 32), "blk.0.ffn_up.weight": (32, 32), "blk.0.ffn_down.weight": (32, 32),
}  # fmt: skip


def write(path, keys=None, shapes=None, kinds=None, **options):
    """A tiny llama with changed metadata or shapes; None leaves an entry out."""
    values = {**gguf_writing.metadata(HF), "tokenizer.ggml.eos_token_id": 3, **(keys or {})}
    values = {key: value for key, value in values.items() if value is not None}
    shapes = {name: shape for name, shape in {**SHAPES, **(shapes or {})}.items() if shape is not None}
    tensors = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
    gguf_writing.write(path, values, tensors, kinds, **options)
    return path


def test_the_file_is_right_without_changes(tmp_path):
    config = models.from_pretrained(write(tmp_path / "x.gguf"))[1]
    assert (config.vocab_size, config.head_dim, config.eos_token_ids, config.rms_norm_eps) == (8, 16, (3,), 1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"general.architecture": "gemma2"},
            "unsupported GGUF architecture 'gemma2', expected one of llama, qwen2, qwen3",
        ),
        ({"general.architecture": "mistral3"}, "unsupported GGUF architecture 'mistral3'"),
        ({"general.type": "adapter"}, "holds a GGUF of type 'adapter', expected 'model'"),
        ({"llama.block_count": None, "llama.context_length": None}, "lacks llama.block_count, llama.context_length"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "lacks llama.attention.layer_norm_rms_epsilon"),
        ({"llama.attention.head_count": 0}, "num_q_heads must be a positive integer, got 0"),
        ({"llama.block_count": 1 << 24}, "llama.block_count is 16777216, but the file has only 12 tensors"),
        ({"llama.attention.head_count": "two"}, "head_count must be a whole number, got 'two'"),
        ({"llama.attention.layer_norm_rms_epsilon": 1}, "layer_norm_rms_epsilon must be a number, got 1"),
        ({"llama.feed_forward_length": [32, 64]}, "feed_forward_length that differs between layers: .32, 64."),
        ({"llama.attention.value_length": 8}, "attention.value_length=8, expected head_dim 16"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8, expected head_dim 16"),
        ({"llama.expert_count": 8}, "llama.expert_count=8, expected 0"),
        ({"llama.attention.scale": 0.5}, "llama.attention.scale=0.5"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type='yarn', expected none"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor=4.0"),
        ({"tokenizer.ggml.eos_token_id": 8}, "eos_token_ids must lie in .0, 8., got .8."),
        ({"tokenizer.ggml.eos_token_id": "2"}, "tokenizer.ggml.eos_token_id has the wrong type, got 2"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens has the wrong type"),
        ({"split.count": 2}, "is one part of a split GGUF file"),
    ],
)
def test_wrong_metadata_are_named(keys, message, tmp_path):
    with pytest.raises(ValueError, match=f"x.gguf.*{message}"):
        models.from_pretrained(write(tmp_path / "x.gguf", keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.feed_forward_length": [32]},
        {"llama.attention.sliding_window": 64},
        {"llama.rope.scaling.type": "none"},
        {"llama.expert_count": 0},
        {"llama.attention.key_length": None, "llama.attention.value_length": None, "llama.rope.dimension_count": None},
        {"llama.vocab_size": None},
        {"llama.rope.freq_base": None},
    ],
)
def test_harmless_metadata_change_nothing(keys, tmp_path):
    """The same model, said in another way."""
    plain = gguf_files.read_config(gguf_files.open_file(write(tmp_path / "x.gguf")))
    assert gguf_files.read_config(gguf_files.open_file(write(tmp_path / "y.gguf", keys))) == plain


@pytest.mark.parametrize(
    ("tokens", "keys", "ends"),
    [
        (["a", "<|eot_id|>", "c", "d"], {"eos": 3}, (3, 1)),
        (["a", "<|im_end|>", "c", "d"], {"eos": 1}, (1,)),
        (["a", "b", "c", "d"], {"eos": 2, "eot": 1, "eom": 0}, (2, 1, 0)),
        (["a", "b", "c", "d"], {}, ()),
    ],
)
def test_tokens_that_end_a_text(tokens, keys, ends, tmp_path):
    keys = {f"tokenizer.ggml.{key}_token_id": value for key, value in keys.items()}
    keys = {"tokenizer.ggml.eos_token_id": None, "tokenizer.ggml.tokens": tokens, "llama.vocab_size": 8, **keys}
    assert gguf_files.read_config(gguf_files.open_file(write(tmp_path / "x.gguf", keys))).eos_token_ids == ends


def test_every_wrong_tensor_is_in_one_error(tmp_path):
    shapes = {
        "blk.0.attn_q.bias": (32,), "blk.0.ffn_up.weight": (32, 64), "blk.0.ffn_norm.weight": None,
        "token_embd.weight": (6, 32),
    }  # fmt: skip
    with pytest.raises(ValueError) as caught:
        models.from_pretrained(write(tmp_path / "x.gguf", shapes=shapes))
    first, *lines = str(caught.value).splitlines()
    assert first == f"{tmp_path / 'x.gguf'} does not hold the model of its metadata:"
    assert sorted(line.strip() for line in lines) == [
        "misshaped blk.0.ffn_up.weight: got [32, 64], expected [32, 32]",
        "misshaped token_embd.weight: got [6, 32], expected [8, 32]",
        "missing blk.0.ffn_norm.weight [32]",
        "unused blk.0.attn_q.bias [32]",
    ]
    with pytest.raises(ValueError, match="x.gguf: the file lacks token_embd.weight"):
        models.from_pretrained(write(tmp_path / "x.gguf", shapes={"token_embd.weight": None}))
    assert models.from_pretrained(write(tmp_path / "x.gguf", shapes={"output.weight": None}))[1].tie_word_embeddings


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.geomspace(1, 8, 8), "rope_freqs.weight: expected factors of the llama3 rule"),
        (np.ones(4), r"rope_freqs.weight must have shape \[8\], got \[4\]"),
    ],
)
def test_wrong_rope_factors_are_refused(factors, message, tmp_path):
    values = {**gguf_writing.metadata(HF)}
    tensors = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    gguf_writing.write(tmp_path / "x.gguf", values, {**tensors, "rope_freqs.weight": factors})
    with pytest.raises(ValueError, match=f"x.gguf: .*{message}"):
        models.from_pretrained(tmp_path / "x.gguf")


def test_a_type_that_cannot_be_decoded_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "x.gguf")
    file = gguf_files.open_file(path)

    def dequantize(block, kind):
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", dequantize)
    with pytest.raises(ValueError, match="x.gguf: the package gguf cannot decode type F32 of tensor output.weight"):
        file.read("output.weight", np.dtype(np.float32))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file: it begins with b'', expected b'GGUF'"),
        (b"PK\x03\x04 a zip", "is not a GGUF file: it begins with b'PK"),
        (b"GG", "is not a GGUF file"),
        (b"GGUF\x03", "is truncated: got 5 bytes"),
        (b"GGUF" + struct.pack("<I", 3), "is truncated: got 8 bytes"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1, expected version 2 or 3"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4, expected version 2 or 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF file, expected a little-endian one"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 99),
            "unknown type 99",
        ),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2) + b"\xff\xfe", "a text is not UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "is truncated"),
    ],
)
def test_foreign_files_are_refused(content, message, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    for load in (
        models.from_pretrained,
        models.load_tokenizer,
        models.special_tokens,
        models.ChatTemplate.from_directory,
    ):
        with pytest.raises(ValueError, match=f"x.gguf {message}|x.gguf is .*{message}"):
            load(path)


def test_big_endian_file_of_the_package(tmp_path):
    with pytest.raises(ValueError, match="is a big-endian GGUF file"):
        models.from_pretrained(write(tmp_path / "x.gguf", endian=gguf.GGUFEndian.BIG))


def test_every_truncation_is_named(tmp_path):
    """At any byte of the header, and in the data."""
    path = write(tmp_path / "x.gguf", {"tokenizer.ggml.tokens": [*"abcdefgh"]}, kinds={"output.weight": QUANTS.Q4_1})
    whole = path.read_bytes()
    header = gguf_files.open_file(path).tensors["token_embd.weight"].begin
    cut = tmp_path / "cut.gguf"
    for length in [*range(8, header, 7), *range(header, len(whole), 997), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"cut.gguf is truncated: got {length} bytes, expected"):
            gguf_files.open_file(cut)
    with pytest.raises(ValueError, match=rf"got {len(whole) - 1} bytes, expected \d+$"):
        gguf_files.open_file(cut)


def test_flipped_bytes_are_a_value_error_or_a_model(tmp_path):
    """Never another exception, and never a long search."""
    path = write(tmp_path / "x.gguf", {"tokenizer.ggml.tokens": [*"abcdefgh"], "tokenizer.ggml.merges": ["a b"]})
    whole = path.read_bytes()
    header = gguf_files.open_file(path).tensors["token_embd.weight"].begin
    rng, start, refused = np.random.default_rng(0), time.perf_counter(), 0
    for _ in range(500):
        damaged = bytearray(whole)
        damaged[rng.integers(header)] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            file = gguf_files.open_file(path)
            config = gguf_files.read_config(file)
            gguf_files.GGUFTensors.of(file, config, models.files.tables.checkpoint.checkpoint_table(config))
            gguf_files.special_tokens(file)
        except ValueError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 150 and time.perf_counter() - start < 30


def test_a_directory_must_hold_one_gguf_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="no GGUF file .*absent.gguf"):
        models.from_pretrained(tmp_path / "absent.gguf")
    with pytest.raises(FileNotFoundError, match="no config.json and no GGUF file in "):
        models.from_pretrained(tmp_path)
    write(tmp_path / "b.gguf")
    assert locate_gguf(tmp_path) == tmp_path / "b.gguf"
    write(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="holds 2 GGUF files, expected one; pass the path of one of: a.gguf, b.gguf"):
        models.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert locate_gguf(tmp_path) is None
    part = write(tmp_path / "model-00001-of-00002.gguf")
    with pytest.raises(ValueError, match="is one part of a split GGUF file"):
        models.from_pretrained(part)


def test_a_file_of_a_sentencepiece_model_still_gives_weights(tmp_path):
    """Only its tokenizer is refused."""
    path = tmp_path / "x.gguf"
    path.write_bytes(golden("mistral")["gguf"].tobytes())
    assert models.from_pretrained(path)[1].num_layers == 2
    with pytest.raises(ValueError, match="x.gguf has no tokenizer: it lacks tokenizer.ggml.model"):
        models.load_tokenizer(path)
    with pytest.raises(ValueError, match="has no tokenizer"):
        gguf_files.convert(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
