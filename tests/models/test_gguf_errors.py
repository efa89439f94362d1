"""Every way a GGUF file can be wrong, cut, edited or hostile: a ValueError that names the file, in little time and space."""

import re
import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import models
from models.files import gguf as gguf_files
from models.files.directories import locate_gguf
from models.files.gguf.header import parse
from models.files.tables.checkpoint import checkpoint_table
from tests.models import gguf_writing
from tests.models.test_gguf import checkpoint, golden, write_both
from tests.models.tiny_gguf import write_tiny_gguf

LLAMA = checkpoint("yi")


def write(path, keys=None, tensors=None):
    """A tiny llama with changed metadata or tensors; None leaves an entry out."""
    values = {**gguf_writing.metadata(LLAMA[0]), **(keys or {})}
    stored = {**gguf_writing.stored(*LLAMA), **(tensors or {})}
    gguf_writing.write(path, *({key: x for key, x in given.items() if x is not None} for given in (values, stored)))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny model's file, with a tokenizer; its directory in Hugging Face's layout is beside it."""
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf"))


def read_all(path):
    """Read all that a file declares."""
    file = gguf_files.open_file(path)
    config = gguf_files.read_config(file)
    gguf_files.GGUFTensors.of(file, config, checkpoint_table(config))
    for read in (gguf_files.build_tokenizer, gguf_files.chat_templates, gguf_files.special_tokens):
        read(file)


@pytest.mark.parametrize(
    ("key", "value", "name"),
    [
        ("general.architecture", "gemma2", "architecture 'gemma2', expected"),
        ("general.type", "adapter", "'adapter', expected 'model'"),
        ("llama.context_length", None, "lacks llama.context_length"),
        ("llama.attention.layer_norm_rms_epsilon", None, "lacks llama.attention.layer_norm_rms_epsilon"),
        ("llama.attention.head_count", 0, "num_attention_heads"),
        ("llama.block_count", 1 << 24, "block_count is 16777216"),
        ("llama.attention.head_count", "two", "head_count"),
        ("llama.attention.layer_norm_rms_epsilon", 1, "layer_norm_rms_epsilon"),
        ("llama.feed_forward_length", [32, 64], "feed_forward_length"),
        ("llama.attention.value_length", 6, "value_length=6"),
        ("llama.rope.dimension_count", 6, "dimension_count=6"),
        ("llama.expert_count", 8, "expert_count=8"),
        ("llama.attention.scale", 0.5, "attention.scale=0.5"),
        ("llama.rope.scaling.type", "yarn", "scaling.type='yarn'"),
        ("llama.rope.scaling.factor", 4.0, "scaling.factor=4.0"),
        ("tokenizer.ggml.eos_token_id", 10**6, "eos_token_ids"),
        ("tokenizer.ggml.eos_token_id", "2", "eos_token_id"),
        ("tokenizer.ggml.tokens", [1, 2], "tokenizer.ggml.tokens"),
        ("split.count", 2, "part of a split"),
    ],
)
def test_wrong_metadata_are_named(key, value, name, tmp_path):
    with pytest.raises(ValueError, match=f"x.gguf.*{name}"):
        models.from_pretrained(write(tmp_path / "x.gguf", {key: value}))


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gemma3_text", "rope.scaling.type", "yarn"), ("gemma3_text", "attention.sliding_window_pattern", 4),
        ("gpt_oss", "expert_count", 0), ("gpt_oss", "expert_used_count", "2"), ("qwen2_bias", "attention.sliding_window", 16),
        ("phi4_longrope", "rope.scaling.attn_factor", 3.0), ("phi3", "attn_logit_softcapping", 3.0),
        *(("qwen3_next", key, value) for key, value in (
            ("ssm.state_size", None), ("rope.dimension_count", None), ("expert_count", 0), ("full_attention_interval", 0),
            ("ssm.inner_size", 25), ("ssm.conv_kernel", 4.0), ("expert_gating_func", 2), ("expert_weights_norm", False),
            ("attention.recurrent_layers", [True] * 4), ("rope.scaling.type", "yarn"), ("nextn_predict_layers", -1.0),
            ("nextn_predict_layers", 4),
        )),
    ],
)  # fmt: skip
def test_what_a_file_of_a_family_may_not_ask_for_is_named(name, key, value, tmp_path):
    arch = write_both(tmp_path, name, **{key: value})
    with pytest.raises(ValueError, match=f"x.gguf: .*({arch}.{key}|num_local_experts|sliding window)"):
        models.from_pretrained(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.0.attn_gate.weight": None}, "missing blk.0.attn_gate.weight [24, 16]"),
        ({"blk.1.ssm_conv1d.weight": np.ones((64, 3), np.float32)}, "misshaped blk.1.ssm_conv1d.weight: got [64, 3]"),
        ({"blk.0.ffn_gate_exps.weight": None, "blk.0.ffn_gate_up_exps.weight": np.ones((4, 24, 16), np.float32)},
         "unused blk.0.ffn_gate_up_exps.weight [4, 24, 16]"),
        ({"blk.2.ssm_a": np.zeros(4, np.float32)}, "tensor blk.2.ssm_a must have numbers below 0"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_the_model_s_is_named(change, message, tmp_path):
    write_both(tmp_path, "qwen3_next", more=change)
    with pytest.raises(ValueError, match=re.escape(message)):
        models.from_pretrained(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "keys",
    [
        {"llama.feed_forward_length": [LLAMA[0]["intermediate_size"]]},
        {"llama.attention.sliding_window": LLAMA[0]["max_position_embeddings"]},
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
    shapes = {"blk.0.attn_q.bias": (32,), "blk.0.ffn_up.weight": (32, 64), "token_embd.weight": (6, 32)}
    wrong = {**{name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, "blk.0.ffn_norm.weight": None}
    with pytest.raises(ValueError, match="x.gguf") as caught:
        models.from_pretrained(write(tmp_path / "x.gguf", tensors=wrong))
    assert sorted(line.split(":")[0].split(" [")[0].strip() for line in str(caught.value).splitlines()[1:]) == [
        "misshaped blk.0.ffn_up.weight", "misshaped token_embd.weight", "missing blk.0.ffn_norm.weight",
        "unused blk.0.attn_q.bias",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="x.gguf.*token_embd.weight"):
        models.from_pretrained(write(tmp_path / "x.gguf", tensors={"token_embd.weight": None}))
    assert models.from_pretrained(write(tmp_path / "x.gguf", tensors={"output.weight": None}))[1].tie_word_embeddings


@pytest.mark.parametrize("factors", [np.geomspace(1, 8, 2), np.ones(4)], ids=len)
def test_wrong_rope_factors_are_refused(factors, tmp_path):
    write(tmp_path / "x.gguf", tensors={"rope_freqs.weight": factors})
    with pytest.raises(ValueError, match="x.gguf: .*rope_freqs.weight"):
        models.from_pretrained(tmp_path / "x.gguf")


def text(value):
    return struct.pack("<Q", len(value)) + value


def header(tensors, keys, body=b""):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a GGUF file"),
        (b"PK\x03\x04 a zip", "is not a GGUF file"),
        (b"GG", "is not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(2**63, 0), "truncated"),  # tensors that are not there
        (header(0, 2**63), "truncated"),  # keys that are not there
        (header(0, 1, struct.pack("<Q", 2**62)), "truncated"),  # a text that is longer than any file
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 4, 2**62)), "truncated"),  # a list of numbers
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 2**62)), "truncated"),  # a list of texts
        (header(0, 1, text(b"k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000), "lists in lists"),
        (header(0, 1, text(b"k") + struct.pack("<I", 77)), "unknown type 77"),
        (header(0, 1, text(b"\xff") + struct.pack("<II", 4, 1)), "not UTF-8"),
        (header(1, 0, text(b"t") + struct.pack("<I", 2**31)), "truncated"),  # a tensor of so many axes
        (header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)), "truncated"),  # of so many numbers
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 32, 999, 0)), "unknown type 999"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0)), "no whole blocks of 32"),
        (header(2, 0, 2 * (text(b"t") + struct.pack("<IQIQ", 1, 32, 0, 0))), "tensor t twice"),
    ],
)  # fmt: skip
def test_foreign_files_and_false_claims_are_refused(content, message, tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    for load in (models.from_pretrained, models.load_tokenizer, models.ChatTemplate.from_directory):
        with pytest.raises(ValueError, match=f"x.gguf .*{message}"):
            load(path)


@given(st.data())
@settings(max_examples=60, deadline=2000, derandomize=True)
def test_a_cut_is_named_and_a_changed_byte_is_an_error_or_a_model(whole, data):
    """Never another exception, and never a long search."""
    content = whole.read_bytes()
    begin = min(tensor.begin for tensor in gguf_files.open_file(whole).tensors.values())
    damaged = whole.with_name("damaged.gguf")
    if data.draw(st.booleans()):
        length = data.draw(st.integers(8, begin) | st.integers(begin, len(content) - 1))
        damaged.write_bytes(content[:length])
        with pytest.raises(ValueError, match=rf"damaged.gguf is truncated: got {length} bytes, expected"):
            gguf_files.open_file(damaged)
        return
    at, byte = data.draw(st.integers(0, 3000) | st.integers(begin - 3000, begin - 1)), data.draw(st.integers(0, 255))
    damaged.write_bytes(content[:at] + bytes([byte]) + content[at + 1 :])
    try:
        read_all(damaged)
    except ValueError as error:
        assert damaged.name in str(error)


@pytest.mark.parametrize("other", ["x", 1.5, True, [1, "a"], 7], ids=repr)
def test_metadata_of_a_wrong_type_is_named(whole, other, monkeypatch):
    """Any key of any other type: what reads it says so, or does not need it."""
    metadata, tensors = parse(np.fromfile(whole, np.uint8))
    for key, value in metadata.items():
        changed = {**metadata, key: value if type(other) is type(value) else other}
        monkeypatch.setattr(gguf_files.reader, "parse", lambda data, changed=changed: (changed, tensors))
        try:
            read_all(whole)
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
        data = header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, block, kind.value, 0))
        (tmp_path / "x.gguf").write_bytes(data + bytes(-len(data) % 32 + size))
        with pytest.raises(ValueError, match=f"cannot decode type {kind.name} of tensor t"):
            gguf_files.open_file(tmp_path / "x.gguf").read("t", np.dtype(np.float32))


def test_a_directory_must_hold_one_gguf_file_and_a_file_is_no_directory(tmp_path, whole):
    with pytest.raises(ValueError, match=r"is not a GGUF file: .*for the model beside it pass the directory .*hf"):
        models.from_pretrained(whole.parent / "hf" / "model.safetensors")
    with pytest.raises(FileNotFoundError, match=r"tiny\.gguf is a file, expected a model's directory"):
        models.checkpoint_directory(whole)
    with pytest.raises(FileNotFoundError, match="no GGUF file .*absent.gguf"):
        models.from_pretrained(tmp_path / "absent.gguf")
    with pytest.raises(FileNotFoundError, match="no config.json and no GGUF file in "):
        models.from_pretrained(tmp_path)
    write(tmp_path / "b.gguf")
    assert locate_gguf(tmp_path) == tmp_path / "b.gguf"
    write(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match="holds 2 GGUF files.*a.gguf, b.gguf"):
        models.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert locate_gguf(tmp_path) is None
    with pytest.raises(ValueError, match="part of a split"):
        models.from_pretrained(write(tmp_path / "model-00001-of-00002.gguf"))


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
