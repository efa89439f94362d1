"""Checkpoints, random parameters, tokenizers: round trips, dtypes, and every way a directory can be wrong."""

import contextlib
import dataclasses
import itertools
import json
import os

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from filelock import FileLock
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models

import models
from models import Experts, weights
from models.files import replaced_files
from models.files.tables import checkpoint as checkpoint_table
from models.hub import named_models
from tests.tiny_models import FAMILIES, vivid_params

pytestmark = pytest.mark.usefixtures("quick_compile")  # tests/models/test_parity.py compiles as users do

LLAMA = dataclasses.replace(FAMILIES["llama"], eos_token_ids=(3,))
EXPERTS = Experts(num_experts=4, num_experts_per_tok=2, intermediate_size=48, norm_topk_prob=True, layers=(0, 1))
SPARSE = dataclasses.replace(EXPERTS, intermediate_size=24, norm_topk_prob=False, layers=(1,))
CONFIGS = {
    **FAMILIES,
    "mixtral": dataclasses.replace(FAMILIES["llama"], experts=EXPERTS, tie_word_embeddings=True),
    "qwen3_moe": dataclasses.replace(FAMILIES["qwen3"], experts=SPARSE),
}
EMBEDDING, LM_HEAD = checkpoint_table.EMBEDDING, checkpoint_table.LM_HEAD


def assert_trees_equal(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.fixture
def saved(tmp_path, request):
    """A saved tiny model: directory, params, config. The family is the parameter, llama by default."""
    config = CONFIGS[request.param if "param" in vars(request) else "llama"]
    params = vivid_params(config)
    models.save_pretrained(tmp_path / "model", params, config)
    return tmp_path / "model", params, config


def edit(directory, **changes):
    """Rewrite the weight file with tensors replaced, or dropped where the new value is None."""
    tensors = load_file(directory / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, directory / "model.safetensors")


def shard(directory, parts=2):
    """Split the single weight file into shards with an index; returns their names."""
    tensors = load_file(directory / "model.safetensors")
    files = [f"model-{i + 1:05}-of-{parts:05}.safetensors" for i in range(parts)]
    weight_map = {name: files[i % parts] for i, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return files


@pytest.mark.parametrize("saved", CONFIGS, indirect=True)
def test_saved_weights_load_unchanged(saved):
    directory, params, config = saved
    assert sorted(path.name for path in directory.iterdir()) == ["config.json", "model.safetensors"]
    loaded, loaded_config = models.from_pretrained(directory)
    assert loaded_config == config
    assert_trees_equal(loaded, params)


def test_shards_load_as_one_file_does(saved):
    directory, params, _ = saved
    shard(directory, 3)
    assert_trees_equal(models.from_pretrained(directory)[0], params)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("wanted", [None, "float32", "bfloat16"])
def test_weights_are_cast_to_the_dtype_asked_for(saved, stored, wanted, tmp_path):
    _, params, config = saved
    models.save_pretrained(tmp_path / "again", params, config, dtype=stored)
    loaded, loaded_config = models.from_pretrained(tmp_path / "again", dtype=wanted)
    assert loaded_config.dtype == (wanted or stored)
    coarse = "bfloat16" in (stored, wanted)
    for got, exact in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        assert got.dtype == jnp.dtype(loaded_config.dtype)
        expected = np.asarray(exact).astype(ml_dtypes.bfloat16) if coarse else np.asarray(exact)
        np.testing.assert_array_equal(np.asarray(got).astype(np.float32), expected.astype(np.float32))


def test_float16_files_load_as_float32(saved):
    directory, params, _ = saved
    half = {name: value.astype(np.float16) for name, value in load_file(directory / "model.safetensors").items()}
    save_file(half, directory / "model.safetensors")
    loaded, _ = models.from_pretrained(directory)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), loaded, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("saved", ["qwen3_tied"], indirect=True)
@pytest.mark.parametrize("names", [(EMBEDDING,), (LM_HEAD,), (EMBEDDING, LM_HEAD)])
def test_tied_weights_under_either_name(saved, names):
    directory, params, _ = saved
    table = load_file(directory / "model.safetensors")[EMBEDDING]
    edit(directory, **{EMBEDDING: None, **dict.fromkeys(names, table)})
    assert_trees_equal(models.from_pretrained(directory)[0], params)


@pytest.mark.parametrize("saved", ["qwen3_tied"], indirect=True)
def test_tied_weights_that_differ_are_refused(saved):
    directory, _, _ = saved
    edit(directory, **{LM_HEAD: np.zeros((64, 32), np.float32)})
    with pytest.raises(ValueError, match="embeddings are tied, but model.embed_tokens.weight and lm_head.weight differ"):
        models.from_pretrained(directory)


@pytest.mark.parametrize("saved", ["qwen3"], indirect=True)
def test_every_tensor_problem_is_in_one_error(saved):
    directory, _, _ = saved
    edit(directory, **{
        "model.norm.weight": None,
        "lm_head.weight": None,
        "model.layers.0.self_attn.q_norm.weight": np.ones((8,), np.float32),
        "model.layers.1.mlp.down_proj.weight": np.ones((32, 48), np.int8),
        "model.layers.0.self_attn.q_proj.bias": np.ones((64,), np.float32),
        "model.layers.2.input_layernorm.weight": np.ones((32,), np.float32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones((8,), np.float32),  # old buffer, no problem
    })  # fmt: skip
    with pytest.raises(ValueError) as caught:
        models.from_pretrained(directory)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{directory} does not hold the model of its config.json:"
    assert sorted(line.strip() for line in lines[1:]) == [
        "misshaped model.layers.0.self_attn.q_norm.weight: got [8], expected [16]",
        "missing lm_head.weight [64, 32]",
        "missing model.norm.weight [32]",
        "unused model.layers.0.self_attn.q_proj.bias [64]",
        "unused model.layers.2.input_layernorm.weight [32]",
        "wrong dtype model.layers.1.mlp.down_proj.weight: got I8 without the scales "
        "model.layers.1.mlp.down_proj.weight_scale, expected scales or one of F32, F16, BF16",
    ]


def test_missing_files_are_named(saved, tmp_path):
    directory, _, _ = saved
    with pytest.raises(FileNotFoundError, match="no model directory .*absent"):
        models.from_pretrained(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="no config.json and no GGUF file in "):
        models.from_pretrained(tmp_path)
    (directory / "model.safetensors").rename(directory / "other.safetensors")
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors or .*found \['other.safetensors'\]"):
        models.from_pretrained(directory)
    (directory / "other.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="found no .safetensors file"):
        models.from_pretrained(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match="found pytorch_model.bin, a pickle"):
        models.from_pretrained(directory)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="holds an adapter .*merge"):
        models.from_pretrained(tmp_path)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_damaged_or_missing_weight_file_is_named(saved, parts):
    directory, _, _ = saved
    path = directory / (shard(directory)[1] if parts > 1 else "model.safetensors")
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[:200], whole[:-1], whole[:-1000], whole[:8] + b"#" * 50 + whole[58:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path.name} is damaged: got {len(content)} bytes"):
            models.from_pretrained(directory)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=path.name):
        models.from_pretrained(directory)


@pytest.mark.parametrize(("base", "extra", "expected"), [(3, [3, 5], (3, 5)), (None, 7, (7,)), ([4, 3], None, (4, 3))])
def test_generation_config_adds_eos_ids(saved, base, extra, expected):
    directory, _, _ = saved
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": base}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": extra}))
    assert models.from_pretrained(directory)[1].eos_token_ids == expected


@pytest.mark.parametrize(
    ("texts", "ends"),
    [(["<|im_start|>", "<|im_end|>"], (3, 6)), (["<|end|>", "<|return|>"], (3, 6, 5)),
     (["<|end|>", "<|return|>", "<|call|>"], (3, 6, 7))],
)  # fmt: skip
@pytest.mark.parametrize("whole", [False, True])
def test_the_tokenizer_adds_ends_of_turns(saved, texts, ends, whole):
    """Known by their text; in gpt-oss' format, which has two more ends, <|end|> closes one message of several."""
    directory, _, _ = saved
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": 3}
    (directory / "config.json").write_text(json.dumps(config))
    added = {5 + i: text for i, text in enumerate(texts)} | {10**6: "<end_of_turn>"}  # which has no row
    if whole:
        file, content = "tokenizer.json", {"added_tokens": [{"id": i, "content": text} for i, text in added.items()]}
    else:
        file, content = "tokenizer_config.json", {"added_tokens_decoder": {i: {"content": x} for i, x in added.items()}}
    (directory / file).write_text(json.dumps(content))
    assert models.from_pretrained(directory)[1].eos_token_ids == ends


def test_an_end_that_only_the_tokenizer_names(saved):
    """Under any text; and the files of a tokenizer may each list tokens that the other lacks."""
    directory, _, _ = saved
    config = json.loads((directory / "config.json").read_text()) | {"eos_token_id": 3}
    (directory / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": {"content": "[STOP]"}, "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "[STOP]"}]}))
    assert models.from_pretrained(directory)[1].eos_token_ids == (3, 9, 5)


def test_settings_that_are_not_applied_are_said_once(saved, caplog):
    directory, _, _ = saved
    stated = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 0, "suppress_tokens": [4], "temperature": 0.7}
    (directory / "generation_config.json").write_text(json.dumps(stated))
    for _ in range(2):
        models.from_pretrained(directory)
    (record,) = caplog.records
    assert "repetition_penalty=1.1, suppress_tokens=[4]," in record.getMessage()
    (directory / "generation_config.json").write_text(json.dumps({**stated, "do_sample": True, "top_k": None}))
    models.from_pretrained(directory)
    assert "suppress_tokens=[4], temperature=0.7," in caplog.records[-1].getMessage()


def test_save_refuses_foreign_params(saved, tmp_path):
    _, params, config = saved
    wrong = {**params, "stray": {"kernel": jnp.ones((2, 3))}, "final_norm": {"scale": jnp.ones((5,))}}
    del wrong["lm_head"]
    with pytest.raises(ValueError) as caught:
        models.save_pretrained(tmp_path / "out", wrong, config)
    assert sorted(line.strip() for line in str(caught.value).splitlines()[1:]) == [
        "misshaped final_norm/scale: got [5], expected [32]",
        "missing lm_head/embedding [64, 32]",
        "unused stray/kernel [2, 3]",
    ]
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, got 'float64'"):
        models.save_pretrained(tmp_path / "out", params, config, dtype="float64")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("family", "dtype"), [pytest.param("qwen2", "bfloat16", marks=pytest.mark.thorough), ("qwen3_tied", "float32")]
)
def test_random_parameters_have_the_shapes_and_scales_of_the_model(family, dtype):
    config = dataclasses.replace(FAMILIES[family], dtype=dtype, num_layers=4)
    params = models.random_params(config, jax.random.key(0))
    shapes = models.param_shapes(config)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), params) == jax.tree.map(lambda a: (a.shape, a.dtype), shapes)
    qkv = np.asarray(params["layers_0"]["attention"]["qkv"]["kernel"], np.float32)
    down = np.asarray(params["layers_0"]["mlp"]["down"]["kernel"], np.float32)
    assert abs(qkv.std() / 0.02 - 1) < 0.1 and abs(down.std() / (0.02 / 8**0.5) - 1) < 0.1
    assert np.unique(qkv).size > 1000  # bfloat16 values are rounded float32 draws, not coarse ones
    assert (np.asarray(params["final_norm"]["scale"]) == 1).all()
    other = params["layers_1"]["attention"]["qkv"]["kernel"]
    assert not np.array_equal(np.asarray(other, np.float32), qkv)
    assert_trees_equal(models.random_params(config, jax.random.key(0)), params)


def test_a_missing_builtin_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(named_models, "__file__", str(tmp_path / "hub" / "named_models.py"))
    with pytest.raises(FileNotFoundError, match="builtin model is not installed: no config.json in "):
        models.builtin_directory()
    (tmp_path / "builtin").mkdir()
    (tmp_path / "builtin" / "config.json").write_text("{}")
    assert models.builtin_directory() == tmp_path / "builtin"


def test_load_tokenizer_never_truncates(tmp_path):
    tokenizer = models.load_tokenizer(models.builtin_directory())
    whole = tokenizer.encode("one two three four five six").ids
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert models.load_tokenizer(tmp_path).encode("one two three four five six").ids == whole


@pytest.mark.parametrize(
    ("text", "special", "pad", "fits"),
    [
        ("<|vision_pad|>", True, None, True),
        ("padding", False, None, False),
        ("<x>", False, "<x>", True),
        ("<x>", True, None, False),
    ],
)
def test_a_token_beyond_the_embedding_is_for_padding(text, special, pad, fits, tmp_path):
    tokenizer = models.load_tokenizer(models.builtin_directory())
    config = dataclasses.replace(LLAMA, vocab_size=tokenizer.get_vocab_size())
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([text])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": pad}))
    with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="tokenizer.json .* got token ids up to"):
        models.load_tokenizer(tmp_path, config)


def test_random_parameters_need_a_description_and_a_key():
    config, key = FAMILIES["llama"], jax.random.key(0)
    for given, got in (((key, config), "and ModelConfig"), ((config, 0), "ModelConfig and int"), (("llama", key), "str and")):
        with pytest.raises(TypeError, match=rf"random_params\(config, jax.random.key\(seed\)\).*got .*{got}"):
            models.random_params(*given)
    with pytest.raises(TypeError, match="expected save_pretrained.directory, params, config. .*got ModelConfig and dict"):
        models.save_pretrained("nowhere", config, {})


def test_a_large_model_says_how_far_it_is_loaded_and_what_it_takes_to_save(saved, tmp_path, monkeypatch, capsys):
    """Nothing else says that float32, as a GGUF file is loaded, takes twice the bytes."""
    directory, params, config = saved
    models.from_pretrained(directory)
    models.save_pretrained(tmp_path / "small", params, config)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(weights, "_LONG", 1)
    assert_trees_equal(models.from_pretrained(directory)[0], params)
    assert f"loading {directory.name}: 100%" in capsys.readouterr().err
    models.save_pretrained(tmp_path / "again", params, config, dtype="float32")
    models.save_pretrained(tmp_path / "half", params, config, dtype="bfloat16")
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f'kvjax: writing {tmp_path / "again"}: 0 MB in float32, dtype="bfloat16" takes half')
    assert second.endswith("0 MB in bfloat16")


@pytest.mark.parametrize("given", [{"dtype": "float16"}, {"weight_dtype": "int3"}, {"dtype": ["float32"]}])
def test_a_wrong_dtype_is_refused_before_a_model_is_looked_for(given):
    for read in (models.from_pretrained, models.load):
        with pytest.raises(ValueError, match=f"^{next(iter(given))} must be one of"):
            read("no-such-owner/no-such-model", **given)


def write_tokenizer(directory, config="{}"):
    """A tokenizer of as many words as the embedding has rows."""
    vocabulary = {f"t{i}": i for i in range(LLAMA.vocab_size)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(config)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match="tokenizer.json"):
        models.load_tokenizer(tmp_path)


def test_a_saved_model_has_its_tokenizer_and_anybody_may_read_it(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write_tokenizer(source, config='{"eos_token": "t1"}')
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    models.save_pretrained(out, vivid_params(LLAMA), LLAMA, tokenizer=source)
    names = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    for name in names[:1] + names[3:]:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert models.ChatTemplate.from_directory(out).template == "{{ messages[0].content }}"


def test_a_tokenizer_object_is_saved_as_transformers_reads_it(tmp_path):
    write_tokenizer(tmp_path)
    tokenizer = models.load_tokenizer(tmp_path)
    models.save_pretrained(tmp_path / "out", vivid_params(LLAMA), LLAMA, tokenizer=tokenizer)
    assert models.load_tokenizer(tmp_path / "out", LLAMA).to_str() == tokenizer.to_str()
    assert models.special_tokens(tmp_path / "out").get("eos_token") == tokenizer.id_to_token(3)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer.json in "):
        models.save_pretrained(tmp_path / "none", vivid_params(LLAMA), LLAMA, tokenizer=tmp_path / "empty")
    assert not (tmp_path / "none").exists()


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def failing_replace(at):
    """`os.replace` that fails at its call number ``at``."""
    count = itertools.count()

    def replace(source, target, really=os.replace):
        if next(count) == at:
            raise OSError("no permission")
        really(source, target)

    return replace


@pytest.mark.parametrize("existing", [(), ("b",), ("a", "b"), ("b", "other")])
def test_a_failure_never_leaves_a_mixture(tmp_path, monkeypatch, existing):
    """Before the files are moved nothing has changed; while they are moved no reader accepts the directory."""
    directory = tmp_path / "model"
    for name in existing:
        directory.mkdir(exist_ok=True)
        (directory / name).write_text("old")
    before = contents(directory) if existing else None
    with pytest.raises(OSError, match="full"), replaced_files.replaced_files(directory, ("a", "b")) as folder:
        (folder / "a").write_text("half")
        raise OSError("full")
    assert (contents(directory) if directory.exists() else None) == before
    for at in range(2):
        monkeypatch.setattr(replaced_files.os, "replace", failing_replace(at))
        with pytest.raises(OSError, match="no permission"), replaced_files.replaced_files(directory, ("a", "b")) as folder:
            (folder / "a").write_text("new")
            (folder / "b").write_text("new")
        monkeypatch.undo()
        assert not directory.exists() or "b" not in contents(directory)


def test_what_a_killed_save_left_is_removed_and_a_living_one_is_not_disturbed(tmp_path):
    scratch = tmp_path / ".saving"
    scratch.mkdir()
    (scratch / "a").write_text("half")
    with FileLock(scratch / "lock"), pytest.raises(ValueError, match="another process is writing to "):
        with replaced_files.replaced_files(tmp_path, ("a",)):
            pass
    assert (scratch / "a").read_text() == "half"
    with replaced_files.replaced_files(tmp_path, ("a",)) as folder:
        (folder / "a").write_text("new")
    assert contents(tmp_path) == {"a": b"new"}
