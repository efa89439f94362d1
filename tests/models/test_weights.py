"""Checkpoints, random parameters, tokenizers: round trips, dtypes, and every way a directory can be wrong."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import Experts, shapes, weights
from models.files.tables import checkpoint as checkpoint_table
from models.hub import builtin_model
from tests.tiny_models import FAMILIES, vivid_params

pytestmark = pytest.mark.usefixtures("quick_compile")  # tests/models/test_parity.py compiles as users do

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


def test_a_large_model_shows_how_far_it_is_loaded(saved, monkeypatch, capsys):
    directory, params, _ = saved
    models.from_pretrained(directory)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(weights, "_LONG", 1)
    assert_trees_equal(models.from_pretrained(directory)[0], params)
    assert f"loading {directory.name}: 100%" in capsys.readouterr().err


def test_file_is_unfused_and_named_as_in_transformers(saved):
    directory, params, _ = saved
    tensors = load_file(directory / "model.safetensors")
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (64, 32)
    assert tensors["model.layers.1.self_attn.k_proj.weight"].shape == (32, 32)
    assert tensors["model.layers.1.mlp.gate_proj.weight"].shape == (48, 32)
    gate = np.asarray(params["layers_1"]["mlp"]["gate_up"]["kernel"])[:, 0]
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.gate_proj.weight"], gate.T)
    assert json.loads((directory / "config.json").read_text())["model_type"] == "llama"


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


def test_settings_that_change_greedy_tokens_are_said_once(saved, caplog):
    directory, _, _ = saved
    stated = {"repetition_penalty": 1.1, "no_repeat_ngram_size": 0, "suppress_tokens": [4], "temperature": 0.7}
    (directory / "generation_config.json").write_text(json.dumps(stated))
    for _ in range(2):
        models.from_pretrained(directory)
    (record,) = caplog.records
    assert "repetition_penalty=1.1, suppress_tokens=[4]," in record.getMessage()


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


@pytest.mark.parametrize("existing", [False, True])
def test_failed_save_leaves_nothing_partial(saved, tmp_path, monkeypatch, existing):
    directory, params, config = saved
    target = directory if existing else tmp_path / "new"
    before = {path.name: path.read_bytes() for path in directory.iterdir()} if existing else None

    def fail(tensors, filename, metadata):
        filename.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        models.save_pretrained(target, jax.tree.map(jnp.zeros_like, params), config)
    assert ({path.name: path.read_bytes() for path in target.iterdir()} if target.exists() else None) == before


def test_save_over_an_older_model(saved):
    directory, params, config = saved
    models.save_pretrained(directory, jax.tree.map(jnp.zeros_like, params), config)
    assert all(not leaf.any() for leaf in jax.tree.leaves(models.from_pretrained(directory)[0]))


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


def test_random_parameters_are_made_where_the_sharding_says(monkeypatch):
    config = FAMILIES["qwen3"]
    shapes = models.param_shapes(config)  # a few of them, since drawing takes long to compile
    some = {"final_norm": shapes["final_norm"], "layers_0": {"mlp": {"down": shapes["layers_0"]["mlp"]["down"]}}}
    monkeypatch.setattr(weights, "param_shapes", lambda config, weight_dtype: some)
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("x",)), jax.sharding.PartitionSpec())
    plain = models.random_params(config, jax.random.key(0))
    everywhere = models.random_params(config, jax.random.key(0), sharding)
    tree = jax.tree.map(lambda _: sharding, plain)
    for params in (everywhere, models.random_params(config, jax.random.key(0), tree)):
        assert {leaf.sharding for leaf in jax.tree.leaves(params)} == {sharding}
        assert_trees_equal(params, plain)
    del tree["final_norm"]
    with pytest.raises(ValueError, match="shaped like the parameters, differs at final_norm/scale"):
        models.random_params(config, jax.random.key(0), tree)


def test_eight_billion_fit_one_gpu():
    """16 GB of bfloat16, and the largest leaf's float32 draw beside it stays far below 80 GB."""
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(models.param_shapes(shapes.llama31_8b()))]
    assert sum(sizes) == 2 * 8_030_261_248
    assert sum(sizes) + 4 * max(sizes) < 25e9


def test_a_missing_builtin_model_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin_model, "__file__", str(tmp_path / "hub" / "builtin_model.py"))
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


@pytest.mark.parametrize("given", [lambda c, k: (k, c), lambda c, k: (c, 0), lambda c, k: ("llama", k), lambda c, k: (c, c)])
def test_random_parameters_need_a_description_and_a_key(given):
    config, key = FAMILIES["llama"], jax.random.key(0)
    swapped = isinstance(given(config, key)[1], models.ModelConfig) and "the two in the other order"
    with pytest.raises(TypeError, match=rf"expected random_params\(config, jax.random.key\(seed\)\).*got {swapped or ''}"):
        models.random_params(*given(config, key))
    with pytest.raises(TypeError, match="expected save_pretrained.directory, params, config. .*got ModelConfig and dict"):
        models.save_pretrained("nowhere", config, {})


def test_saving_a_large_model_says_its_size(saved, tmp_path, monkeypatch, capsys):
    """Nothing else says that float32, as a GGUF file is loaded, takes twice the bytes."""
    _, params, config = saved
    models.save_pretrained(tmp_path / "small", params, config)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(weights, "_LONG", 1)
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
