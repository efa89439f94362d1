"""GGUF files against transformers' own loading of them, and what is written of them."""

import hashlib
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors import safe_open
from safetensors.numpy import save_file

import models
from models.files import gguf as gguf_files
from models.files.tables.checkpoint import checkpoint_table
from tests.models import gguf_writing
from tests.models.gguf_writing import QUANTS
from tests.models.test_families import edges
from tests.models.test_families import weights as drawn_weights
from tests.models.test_parity import GOLDENS, TOLERANCE, read_golden
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import run

pytestmark = pytest.mark.usefixtures("quick_compile")  # tests/models/test_parity.py compiles as users do

GGUF_GOLDENS = GOLDENS / "gguf"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def golden(family):
    with np.load(GGUF_GOLDENS / f"{family}.npz") as arrays:
        return dict(arrays)


def tensors_of(params, config):
    """The parameters under their names in Hugging Face checkpoints."""
    flat = flatten_dict(params, sep="/")
    for leaf in checkpoint_table(config):
        yield from leaf.split(np.asarray(flat[leaf.path])).items()


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, np.float32).tobytes()).hexdigest()[:16]


def from_golden(family, folder):
    """What transformers reads of a file, and what we read of it."""
    expected = golden(family)
    (folder / "tiny.gguf").write_bytes(expected["gguf"].tobytes())
    return expected, *models.from_pretrained(folder / "tiny.gguf")


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_equal_what_transformers_reads(family, tmp_path):
    """Every bit, of files with seven types of tensors."""
    expected, params, config = from_golden(family, tmp_path)
    sums = {name: digest(tensor) for name, tensor in tensors_of(params, config)}
    assert sums == json.loads(str(expected["sums"]))
    assert config.tie_word_embeddings == (family == "qwen2")


@pytest.mark.parametrize("family", [pytest.param(x, marks=[pytest.mark.thorough] * (x != "qwen2")) for x in FAMILIES])
def test_logits_equal_those_of_transformers(family, tmp_path):
    expected, params, config = from_golden(family, tmp_path)
    logits = run(config, params, jnp.asarray(expected["tokens"], jnp.int32))
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=TOLERANCE)


PLAIN = ("llama", "llama3_rope_tied", "mistral", "mistral_window", "qwen2_bias", "qwen3_qk_norm", "qwen3_tied", "yi")
NEXT = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_only_layers": []}
# What a file does not say: every sixth layer of Gemma 3 is full, its scale is of its heads, gpt-oss clamps at 7 and its YaRN
# has the usual bounds, Qwen3-Next has experts in all layers.
CHANGES = {
    "gemma3_text": {"layer_types": ["sliding_attention"] * 3, "query_pre_attn_scalar": 8},
    "gpt_oss": {
        "swiglu_limit": 7.0, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "truncate": False,
                            "original_max_position_embeddings": 16},
    },
    "phi3": {},
    "phi4_longrope": {},
    "qwen3_next": NEXT,
    "qwen3_next wide": {**NEXT, "hidden_size": 32, "moe_intermediate_size": 32},
}  # fmt: skip


def checkpoint(name):
    """The config.json and the tensors of a golden's model of `test_parity.py` or `test_families.py`, as files can say it."""
    if name in PLAIN:
        arrays = read_golden(name)
        weights = {key.removeprefix("weight:"): arrays[key] for key in arrays if key.startswith("weight:")}
        return json.loads(str(arrays["config"])), weights
    hf = edges(name.removesuffix(" wide"), **CHANGES[name])
    table = checkpoint_table(models.ModelConfig.from_hf(hf))
    return hf, drawn_weights({part: leaf.file_shape(i) for leaf in table for i, part in enumerate(leaf.names)})


def write_both(folder, name, kind=QUANTS.F32, *, legacy=False, more=None, **changes):
    """The model of `checkpoint` in ``folder/hf``, and in ``folder/x.gguf`` with matrices of a type, more tensors and keys."""
    hf, weights = checkpoint(name)
    block = gguf.GGML_QUANT_SIZES[kind][0]

    def rounded(x):
        x = np.ascontiguousarray(x, np.float32)
        is_coded = x.ndim > 1 and len(x) > 1 and x.shape[-1] % block == 0
        return gguf.dequantize(gguf.quantize(x, kind), kind) if is_coded else x

    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(hf))
    save_file({key: rounded(x) for key, x in weights.items()}, folder / "hf" / "model.safetensors")
    tensors = {key: x for key, x in (gguf_writing.stored(hf, weights, legacy) | (more or {})).items() if x is not None}
    kinds = {key: kind for key, x in tensors.items() if x.ndim > 1 and x.shape[-1] % block == 0}
    values = gguf_writing.metadata(hf)
    values |= {f"{values['general.architecture']}.{key}": value for key, value in changes.items()}
    values = {key: value for key, value in values.items() if value is not None}
    gguf_writing.write(folder / "x.gguf", values, tensors, kinds)
    return values["general.architecture"]


def test_a_mistral_without_a_window_is_said_when_it_is_loaded(tmp_path, caplog):
    hf, weights = checkpoint("mistral")
    values = gguf_writing.metadata(hf) | {"general.name": "Mistral-7B-v0.1"}
    gguf_writing.write(tmp_path / "x.gguf", values, gguf_writing.stored(hf, weights))
    models.from_pretrained(tmp_path / "x.gguf")
    (record,) = caplog.records
    assert "'Mistral-7B-v0.1' and has no sliding window" in record.getMessage()


@pytest.mark.parametrize(
    ("name", "kind", "legacy"),
    [
        *((name, "F16", False) for name in PLAIN),
        *((name, "F32", False) for name in CHANGES),
        *(("qwen3_next wide", kind, False) for kind in ("F16", "Q8_0")),
        ("qwen3_next", "F32", True),
    ],
)
def test_a_file_is_the_checkpoint_it_was_made_of(name, kind, legacy, tmp_path):
    """Config and parameters; `test_parity.py` and `test_families.py` compare the checkpoints' logits with transformers.

    The legacy file has a layer more, which predicts the token after the next and is not read, and llama.cpp's interval of 4.
    """
    predicting = {"block_count": 5, "nextn_predict_layers": 1, "full_attention_interval": None} if legacy else {}
    more = {"blk.4.nextn.eh_proj.weight": np.ones((16, 32), np.float32)} if legacy else {}
    arch = write_both(tmp_path, name, QUANTS[kind], legacy=legacy, more=more, **predicting)
    params, config = models.from_pretrained(tmp_path)  # a directory that holds one
    wanted, of_hf = models.from_pretrained(tmp_path / "hf", "float32")
    assert config == of_hf
    flat, expected = (flatten_dict(tree, sep="/") for tree in (params, wanted))
    assert flat.keys() == expected.keys()
    for path, value in expected.items():  # 1 is added and taken away again, and a logarithm is of an exponential
        atol = 5e-7 if arch in ("gemma3", "qwen3next") else 0
        np.testing.assert_allclose(flat[path], value, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize(
    "rule", [(8.0, 1.0, 4.0, 8192, 500000.0, 128), (32.0, 1.0, 4.0, 8192, 500000.0, 64), (4.0, 1.0, 16.0, 1000, 1e4, 128)]
)
def test_llama3_rule_is_found_again(rule):
    factor, low, high, old, theta, head_dim = rule
    numbers = dict(factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=old)
    factors = gguf_writing.llama3_factors({**numbers, "rope_theta": theta}, head_dim)
    found = gguf_files.families.scaling_from_factors(factors.astype(np.float64), head_dim, theta)
    assert found == models.RopeScaling(**numbers)
    assert gguf_files.families.scaling_from_factors(np.ones(head_dim // 2), head_dim, theta) is None


# The step of each type in units of a block's largest number (types around zero) or of its range (types with a minimum).
STEPS = {QUANTS.Q8_0: 1 / 127, QUANTS.Q4_0: 1 / 8, QUANTS.Q5_0: 1 / 16, QUANTS.Q4_1: 1 / 15, QUANTS.Q5_1: 1 / 31}


@pytest.mark.parametrize("kind", [*STEPS, QUANTS.BF16, QUANTS.F16, QUANTS.F32], ids=lambda kind: kind.name)
def test_decoded_numbers_lie_within_a_step(kind, tmp_path):
    """Of any shape, and where one piece of rows ends and the next begins; None and both dtypes."""
    rng = np.random.default_rng(0)
    value = (rng.normal(size=(5, 96)) * rng.uniform(0.1, 10, (5, 1))).astype(np.float32)
    gguf_writing.write(
        tmp_path / "x.gguf", {"general.architecture": "llama"}, {"a": value, "b": value[0]}, {"a": kind, "b": kind}
    )
    file = gguf_files.open_file(tmp_path / "x.gguf")
    read = file.read("a", np.dtype(np.float32))
    blocks, got = value.reshape(-1, 32), read.reshape(-1, 32)
    if kind in STEPS:
        size = np.ptp(blocks, 1) if kind in (QUANTS.Q4_1, QUANTS.Q5_1) else np.abs(blocks).max(1)
        step = STEPS[kind] * size[:, None]
        assert (np.abs(got - blocks) <= 1.01 * step).all()  # a step, because 4 bits reach -8 but only +7
        assert len(np.unique(np.round(got / got[np.arange(len(got)), np.abs(got).argmax(1)][:, None], 6))) > 4
    else:
        assert (np.abs(got - blocks) <= {"BF16": 2**-8, "F16": 2**-11, "F32": 0}[kind.name] * np.abs(blocks)).all()
    np.testing.assert_array_equal(file.read("b", np.dtype(np.float32)), read[0])
    bfloat = models.sizes.architecture.HOST_DTYPES["bfloat16"]
    np.testing.assert_array_equal(file.read("a", bfloat), read.astype(bfloat))


@pytest.mark.parametrize(
    ("kind", "halves"), [(QUANTS.Q8_0, (0,)), (QUANTS.Q4_K, (0, 2)), (QUANTS.Q5_K, (0, 2)), (QUANTS.Q6_K, (208,))]
)
def test_a_compiled_program_decodes_the_same_bits(kind, halves):
    blocks = np.random.default_rng(0).integers(0, 256, (64, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in halves:
        blocks[:, at + 1] &= 0xBB  # a scale is a finite number
    got = gguf_files.blocks.DECODE[kind](jnp.asarray(blocks)).reshape(64, -1)
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), gguf.dequantize(blocks, kind).view(np.int32))


def test_parameters_of_a_compiled_program_are_those_of_the_file(tmp_path, monkeypatch):
    write_both(tmp_path, "qwen2_bias", QUANTS.Q8_0)
    wanted, _ = models.from_pretrained(tmp_path, "bfloat16")
    monkeypatch.setattr(gguf_files.blocks, "LEAST", 0)
    with jax.default_device(jax.devices()[-1]):
        got, _ = models.from_pretrained(tmp_path, "bfloat16")
    assert {x.device for x in jax.tree.leaves(got)} == {jax.devices()[-1]}
    for (path, value), other in zip(flatten_dict(wanted, sep="/").items(), flatten_dict(got, sep="/").values(), strict=True):
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other), err_msg=path)
    assert gguf_files.blocks.joined._cache_size() >= 4


def test_rows_are_decoded_in_pieces(tmp_path, monkeypatch):
    value = np.random.default_rng(0).normal(size=(7, 64)).astype(np.float32)
    gguf_writing.write(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"a": value}, {"a": QUANTS.Q4_1})
    file = gguf_files.open_file(tmp_path / "x.gguf")
    whole = file.read("a", np.dtype(np.float32))
    sizes, decode = [], gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda block, kind: sizes.append(len(block)) or decode(block, kind))
    monkeypatch.setattr(gguf_files.reader, "_CHUNK", 3 * 64)
    np.testing.assert_array_equal(file.read("a", np.dtype(np.float32)), whole)
    assert sizes == [3, 3, 1]


@pytest.mark.parametrize(
    ("texts", "ends"),
    [(["<|user|>", "<|end|>"], {0, 2}), (["<|end|>", "<|return|>", "<|call|>"], {0, 2, 3}),
     (["<end_of_utterance>", "_<EOT>", "<|eom_id|>", "end"], {0, 1, 2, 3})],
)  # fmt: skip
def test_an_answer_ends_at_the_tokens_that_end_turns(texts, ends, tmp_path):
    """Though a file names one token alone; llama.cpp's loader knows the others by their text."""
    hf, weights = checkpoint("phi3")
    tokens = ["<|endoftext|>", *texts, *(f"t{i}" for i in range(hf["vocab_size"] - 1 - len(texts)))]
    values = gguf_writing.metadata(hf | {"eos_token_id": None})
    values |= gguf_writing.tokenizer_metadata(tokens, [], "default", eos_token_id=0)
    gguf_writing.write(tmp_path / "x.gguf", values, gguf_writing.stored(hf, weights))
    assert {*models.from_pretrained(tmp_path / "x.gguf")[1].eos_token_ids} == ends


@pytest.mark.parametrize("matrices", [1, 3])
def test_codes_in_nvfp4_are_multiplied_by_their_factors(matrices, tmp_path):
    """As llama.cpp's converter writes them: a factor for each matrix, and a scale for activations, which is not read."""
    blocks = np.random.default_rng(0).integers(0, 120, (*(matrices,)[: matrices > 1], 4, 2 * 36), dtype=np.uint8)
    factors = np.arange(2, 2 + matrices, dtype=np.float32)
    values = {"a.weight": blocks, "a.scale": factors, "a.input_scale": factors, "b.weight": blocks}
    kinds = {"a.weight": QUANTS.NVFP4, "b.weight": QUANTS.NVFP4}
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in values.items():
        writer.add_tensor(name, value, raw_dtype=kinds.get(name))
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    file = gguf_files.open_file(tmp_path / "x.gguf")
    plain, got = (file.read(name, np.dtype(np.float32)) for name in ("b.weight", "a.weight"))
    assert np.abs(plain).max() > 0 and plain.shape[-2:] == (4, 128)
    np.testing.assert_array_equal(got, plain * (factors[:, None, None] if matrices > 1 else 2))
    if matrices > 1:
        np.testing.assert_array_equal(file.read("a.weight", np.dtype(np.float32), 1), got[1])


def test_weights_take_the_dtype_asked_for(tmp_path):
    write_both(tmp_path, "qwen3_tied", QUANTS.F16)
    assert models.from_pretrained(tmp_path / "x.gguf")[1].dtype == "float32"  # which float16 needs
    params, config = models.from_pretrained(tmp_path / "x.gguf", "bfloat16")
    assert config.dtype == "bfloat16" and params["embed"]["embedding"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="^dtype must be one of float32, bfloat16, got 'float16'"):
        models.from_pretrained(tmp_path / "x.gguf", "float16")


@pytest.fixture(scope="module")
def with_tokenizer(tmp_path_factory):
    """A whole file: weights, a tokenizer, a chat template."""
    return write_tiny_gguf(tmp_path_factory.mktemp("whole"))


def as_loaded(source, dtype=None):
    """All that a program loads of a checkpoint."""
    params, config = models.from_pretrained(source, dtype)
    tokenizer = models.load_tokenizer(source, config)
    chat = models.ChatTemplate.from_directory(source)
    return params, config, tokenizer.to_str(), chat, models.special_tokens(source)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_converted_directory_equals_its_file(with_tokenizer, tmp_path, dtype):
    """The directory is the file again: params, config, tokenizer, template, special tokens."""
    calls = []
    out = gguf_files.convert(
        with_tokenizer, tmp_path / "new" / "model", dtype, lambda done, total: calls.append((done, total))
    )
    assert out == tmp_path / "new" / "model"
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    params, *rest = as_loaded(with_tokenizer, dtype)
    converted, *again = as_loaded(out)
    assert again == rest and rest[0].eos_token_ids == (0,)
    assert rest[2] == models.ChatTemplate("<{{ messages[0].content }}>", rest[3])
    for (name, one), (_, two) in zip(tensors_of(params, rest[0]), tensors_of(converted, rest[0]), strict=True):
        np.testing.assert_array_equal(one, two, err_msg=name)
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] and [*calls] == sorted(calls)
    with safe_open(out / "model.safetensors", "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_converted_directory_in_transformers(with_tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    out = gguf_files.convert(with_tokenizer, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    ids = models.load_tokenizer(out).encode("ab a!").ids
    assert theirs("ab a!").input_ids == ids and ids[0] == 1, "a text begins with the file's token"
    text = theirs.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert text == models.ChatTemplate.from_directory(out).render([{"role": "user", "content": "ab"}]) == "<ab>"
    assert theirs.eos_token_id == transformers.AutoConfig.from_pretrained(out).eos_token_id == 0


@pytest.mark.parametrize("at", [0, 3])
def test_failed_conversion_leaves_nothing(with_tokenizer, tmp_path, at):
    calls = []

    def fail(done, total):
        calls.append(done)
        if len(calls) > at:
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        gguf_files.convert(with_tokenizer, tmp_path / "out" / "model", progress=fail)
    assert not list((tmp_path / "out").iterdir())


def test_impossible_conversions_are_refused(with_tokenizer, tmp_path):
    (tmp_path / "full").mkdir()
    with pytest.raises(FileExistsError, match="full exists already"):
        gguf_files.convert(with_tokenizer, tmp_path / "full")
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got 'int8'"):
        gguf_files.convert(with_tokenizer, tmp_path / "new", "int8")
    with pytest.raises(FileNotFoundError, match="no GGUF file .*absent.gguf"):
        gguf_files.convert(tmp_path / "absent.gguf", tmp_path / "new")
    assert not (tmp_path / "new").exists()
