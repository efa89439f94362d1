"""The families of `models.files.tables.families` against transformers: every layer, one pass, decoding in a ragged batch."""

from __future__ import annotations

import functools
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file

import kvjax
import models
from models import sharding
from models.files.hf import config as hf_config
from models.files.tables.checkpoint import checkpoint_table
from models.files.tables.families import FAMILIES, MISSING, channel_order
from models.sizes.parts import LayerRope
from models.sizes.rope_scaling import LinearScaling
from tests import goldens
from tests.models.test_parity import ours
from tests.tiny_models import HF, run

pytestmark = pytest.mark.usefixtures("quick_compile")
FOLDER = goldens.FOLDER / "models" / "families"
TOLERANCE = 1e-5  # of the largest number; float32 in another order of sums


@functools.cache
def generator():
    """The script that makes the goldens, as a module; it imports torch only where it makes one."""
    spec = importlib.util.spec_from_file_location("make_family_goldens", FOLDER / "make_goldens.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = sorted(generator().MODELS)
# Two RoPEs and windows, norms before and after; NoPE and windows, a parallel block; sinks, biases and clamped experts; latent
# attention and routed experts.
DECODED = ("gemma3_text", "cohere2", "gpt_oss", "deepseek_v2")
EXPERTS = ("gpt_oss", "granitemoe", "qwen3_next", "glm4_moe", "minimax_m2", "olmoe", "qwen2_moe")
REPEATED = (
    "gemma3_text", "cohere2", "cohere", "exaone4_full", "glm", "olmo2", "seed_oss", "deepseek_v2", "kimi_k2", "glm4_moe_lite",
    "glm4_moe_plain", "ernie4_5", "olmoe", "qwen2_moe",
)  # what others show together  # fmt: skip


@functools.cache
def golden(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def write_checkpoint(directory, golden):
    directory.mkdir(exist_ok=True)
    directory.joinpath("config.json").write_text(str(golden["config"]))
    save_file(generator().weights(json.loads(str(golden["shapes"]))), directory / "model.safetensors")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return a function from a golden's name to the parameters, the config and the directory."""

    @functools.cache
    def load(name):
        directory = tmp_path_factory.mktemp(name)
        write_checkpoint(directory, golden(name))
        return *models.from_pretrained(directory), directory

    return load


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x in REPEATED)) for x in NAMES])
def test_layers_and_logits_equal_transformers(name, loaded):
    params, config, _ = loaded(name)
    hidden, logits = jax.jit(lambda params, tokens: ours(params, config, tokens))(params, golden(name)["tokens"][:1])
    for got, expected in zip(hidden, golden(name)["hidden"], strict=True):
        assert_close(got[0, -4:], expected)
    assert_close(logits[0], golden(name)["logits"])


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x not in DECODED)) for x in NAMES])
def test_decoding_a_ragged_batch_equals_transformers(name, loaded):
    """Rows with prompts of 15, 9 and 3 tokens, and a window of 6: within, at the end of, and beyond the window."""
    params, config, _ = loaded(name)
    tokens, prompts, expected = (golden(name)[key] for key in ("tokens", "prompts", "decoded"))
    steps = expected.shape[1]
    rows = [row[:count].astype(np.int32) for row, count in zip(tokens, prompts, strict=True)]
    cache = kvjax.prefill(params, rows, config=config, method="full", max_new_tokens=steps)
    assert_close(cache.logits, expected[:, 0])
    for step in range(1, steps):
        given = np.array([row[count + step - 1] for row, count in zip(tokens, prompts, strict=True)], np.int32)
        cache = kvjax.decode_step(params, cache, given)
        assert_close(cache.logits, expected[:, step])


# Experts and latent attention have no codes.
CODED = [x for x in NAMES if x not in EXPERTS and "n_routed_experts" not in generator().MODELS[x][2]]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x != "phi3")) for x in CODED])
def test_a_family_loads_in_8_bits(name, loaded):
    """Codes have the order of channels, and the parts of fused tensors, that floating-point numbers have."""
    params, config = models.from_pretrained(loaded(name)[2], weight_dtype="int8")
    with jax.numpy_rank_promotion("allow"):
        logits = run(config, params, jnp.asarray(golden(name)["tokens"][:1], jnp.int32))
    expected = golden(name)["logits"]
    assert 1e-3 < np.abs(logits[0] - expected).mean() / np.abs(expected).mean() < 0.1


def edges(name, **changes):
    """The config.json of a golden with changes; a value of ... takes a key away."""
    hf = {**json.loads(str(golden(name)["config"])), **changes}
    return {key: value for key, value in hf.items() if value is not ...}


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_read_and_written(name):
    config = models.ModelConfig.from_hf(edges(name))
    assert config.family == edges(name)["model_type"]
    assert models.ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    table = checkpoint_table(config)
    files = {part: list(leaf.file_shape(i)) for leaf in table for i, part in enumerate(leaf.names)}
    assert files == json.loads(str(golden(name)["shapes"]))
    shapes = flatten_dict(models.param_shapes(config), sep="/")
    assert {leaf.path: leaf.shape for leaf in table} == {path: leaf.shape for path, leaf in shapes.items()}


@pytest.mark.parametrize("name", ["gemma3_text", "phi3", "glm4", "olmo3", "qwen3_5_text", *EXPERTS])
def test_a_file_is_written_as_it_was_read(name, loaded, tmp_path):
    """Offsets of norms, the order of channels, fused tensors, and norms over all heads."""
    params, config, directory = loaded(name)
    models.save_pretrained(tmp_path, params, config)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_allclose(after[key], value, rtol=0, atol=2e-7, err_msg=key)  # 1 is added and taken away again


@pytest.mark.parametrize(("name", "unread"), [("qwen3_5_text", "mtp.fc.weight"), ("glm4_moe", "model.layers.3.fc.weight")])
def test_tensors_of_a_head_for_several_tokens_are_not_read(name, unread, tmp_path):
    write_checkpoint(tmp_path, golden(name))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, unread: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    models.from_pretrained(tmp_path)
    save_file({**tensors, "fc.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unused fc.weight"):
        models.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["phi3", "glm4", "olmo3", "qwen3_5_text", *EXPERTS])
def test_a_part_is_joined_from_parts_of_the_file(name):
    """Along the dimension that a mesh splits: the slices of the file's tensors make the slice of the parameter."""
    drawn = generator().weights(json.loads(str(golden(name)["shapes"])))
    for leaf in checkpoint_table(models.ModelConfig.from_hf(edges(name))):
        whole = leaf.join([drawn[part] for part in leaf.names])
        dims = [dim for dim, axis in enumerate(sharding.param_spec(leaf.path, whole.ndim)) if axis]
        for number in range(2 if dims else 0):
            index, size = [slice(None)] * whole.ndim, whole.shape[dims[0]] // 2
            index[dims[0]] = slice(number * size, (number + 1) * size)
            part, where = leaf.part(tuple(index))
            read = [drawn[file][at] for file, at in zip(leaf.names, where, strict=True)]
            np.testing.assert_array_equal(part.join(read), whole[tuple(index)], err_msg=leaf.path)
            halves = vars(leaf).get("gates") == "halves"  # gate and up are read whole, and cut
            assert sum(x.size for x in read) == whole[tuple(index)].size * (2 if halves else 1)


@pytest.mark.parametrize(
    ("head_dim", "rotated", "interleaved", "expected"),
    [
        (8, 8, False, ()),
        (8, 0, True, ()),
        (8, 8, True, (0, 2, 4, 6, 1, 3, 5, 7)),
        (8, 4, False, (0, 1, 4, 5, 2, 3, 6, 7)),
        (8, 4, True, (0, 2, 4, 5, 1, 3, 6, 7)),
        (6, 2, False, (0, 2, 3, 1, 4, 5)),
    ],
)
def test_rotated_pairs_come_first(head_dim, rotated, interleaved, expected):
    assert channel_order(head_dim, rotated, interleaved) == expected


GEMMA = "gemma3_text"
NEAR, FAR = ("sliding_attention", "full_attention")
LONG = {**generator().LONGROPE, "partial_rotary_factor": 1.0}


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        # Files of transformers 4: a pattern, a second base, and a rule that only full layers have.
        (
            "gemma3_text",
            {
                "layer_types": ..., "sliding_window_pattern": 3, "rope_parameters": ..., "rope_theta": 1e6,
                "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "windows": (6, 6, None), "rope_theta": 1e6, "rope_scaling": LinearScaling(factor=8.0),
                "ropes": (LayerRope(theta=5e3),) * 2 + (LayerRope(theta=1e6, scaling=LinearScaling(factor=8.0)),),
            },
        ),
        (GEMMA, {"query_pre_attn_scalar": ..., "head_dim": ...}, {"head_dim": 256, "query_scale": None}),
        (GEMMA, {"query_pre_attn_scalar": 64}, {"query_scale": 0.125, "embedding_multiplier": 4.0}),
        ("gemma2", {"layer_types": ..., "final_logit_softcapping": ...}, {"windows": (6, None, 6), "logit_softcap": 30.0}),
        ("gemma2", {"attn_logit_softcapping": ...}, {"attention_softcap": 50.0}),
        ("gemma2", {"attn_logit_softcapping": None}, {"attention_softcap": None}),
        ("olmo3", {"layer_types": ..., "sliding_window": ...}, {"windows": (4096,) * 3}),
        ("olmo3", {"rope_parameters": ..., "rope_theta": ...}, {"ropes": (), "rope_theta": 5e5}),
        (
            "smollm3",
            {"no_rope_layers": ..., "no_rope_layer_interval": ..., "num_hidden_layers": 4, "rope_parameters": ...},
            {"ropes": (LayerRope(theta=2e6),) * 3 + (LayerRope(theta=2e6, rotated=0),)},
        ),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": ...}, {"windows": (None, 5, None)}),
        ("phi3", {"sliding_window": 64}, {"windows": ()}),  # never narrower than the context
        ("phi3", {"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.25},
         {"ropes": (LayerRope(theta=1e4, rotated=2),) * 3}),
        ("glm4", {"rope_parameters": ..., "rope_theta": 1e4}, {"ropes": (LayerRope(theta=1e4, rotated=4),) * 3}),
        ("glm4", {"attention_bias": ...}, {"qkv_bias": True}),
        ("granite", {"attention_multiplier": 8**-0.5, "logits_scaling": ...},
         {"query_scale": None, "logits_multiplier": 1.0}),
        ("cohere2", {"layer_types": ..., "sliding_window_pattern": 2}, {"windows": (6, None, 6)}),
        ("exaone4", {"sliding_window": None, "layer_types": ...}, {"windows": (), "ropes": ()}),
        ("gpt_oss", {"layer_types": ..., "sliding_window": ...}, {"windows": (128, None, 128), "out_bias": True}),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, {"attention_sinks": True}),
        ("gpt_oss", {"attention_bias": False, "rope_parameters": ...}, {"qkv_bias": False, "out_bias": False}),
        ("seed_oss", {"attention_bias": False}, {"qkv_bias": False, "out_bias": True}),
        ("glm4_moe", {"rope_parameters": ..., "use_qk_norm": ...}, {"ropes": (LayerRope(theta=1e4, rotated=4),) * 3,
                                                                    "qk_norm": False}),
        ("minimax_m2", {"rope_parameters": ..., "rotary_dim": 2}, {"ropes": (LayerRope(theta=5e6, rotated=2),) * 3}),
        ("minimax_m2", {"use_qk_norm": True, "attn_type_list": [1] * 3, "scoring_func": "sigmoid"}, {"wide_qk_norm": True}),
        ("qwen2_moe", {"qkv_bias": False}, {"qkv_bias": False}),
    ],
)  # fmt: skip
def test_absent_and_older_keys_are_read_as_transformers_reads_them(name, change, expected):
    config = models.ModelConfig.from_hf(edges(name, **change))
    assert {field: vars(config)[field] for field in expected} == expected
    assert models.ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


STRANGE = (
    *(None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 10**30, 10**400, 1e-300, 1e300, "", "4"),
    *([], [1], [[1]], ["x"]),
    *({}, {"a": 1}, {"rope_type": 3}, {"rope_type": "llama3", "factor": []}, {"rope_theta": "x"}, {FAR: 3}),
    *({FAR: [], NEAR: {}}, {"partial_rotary_factor": 1e300}, {FAR: {"rope_theta": 1e4}, NEAR: {"partial_rotary_factor": []}}),
)
OLDER = {  # types that are no rows of the table, with the keys that they read
    **HF, "use_sliding_window": True, "sliding_window": None,
    **dict.fromkeys((
        "head_dim", "rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters", "rope_scaling", "layer_types",
        "max_window_layers", "tie_word_embeddings", "attention_bias", "mlp_bias", "torch_dtype", "dtype", "eos_token_id",
        "quantization_config", "partial_rotary_factor",
    ), ...),
}  # fmt: skip


@pytest.mark.parametrize("name", [*NAMES, "llama", "mistral", "qwen2", "qwen3"])
def test_any_json_value_is_read_or_refused_by_a_sentence(name):
    """No value of a key that a family reads ends in another error than ValueError; what is read can be written."""
    older = name not in NAMES
    hf = {key: x for key, x in OLDER.items() if x is not ...} | {"model_type": name} if older else edges(name)
    keys = OLDER if older else {*hf, *FAMILIES[hf["model_type"]].defaults, "layer_types", "no_rope_layers"}
    for key in keys:
        for value in STRANGE:
            try:
                config = models.ModelConfig.from_hf({**hf, key: value})
            except ValueError:
                continue
            assert hash(config) and models.ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config, (key, value)


def test_every_type_that_is_refused_by_name_is_no_family():
    assert not MISSING.keys() & {*FAMILIES, *hf_config.MODEL_TYPES}
    assert {edges(name)["model_type"] for name in NAMES} == FAMILIES.keys(), "every family has a golden"
