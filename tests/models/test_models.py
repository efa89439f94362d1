"""The model description and the decoder: validation, Hugging Face keys, presets, shapes, no dead fields."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import models
from models import LinearLayers, ModelConfig, shapes
from models.files.tables.checkpoint import checkpoint_table
from models.layers.one_row import multiplied
from models.sizes.experts import Experts
from models.sizes.latent import Latent
from models.sizes.parts import LayerRope
from pallas_kernels.machine import Machine, assume_machine
from tests.tiny_models import FAMILIES, HF, SCALING, TINY, dense_attend, run, vivid_params

pytestmark = pytest.mark.usefixtures("quick_compile")  # tests/models/test_parity.py compiles as users do

TOKENS = jax.random.randint(jax.random.key(1), (2, 24), 0, TINY["vocab_size"], jnp.int32)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


def test_from_hf_lists_missing_keys():
    with pytest.raises(ValueError, match="'qwen3' lacks vocab_size, hidden_size, .*num_key_value_heads"):
        ModelConfig.from_hf({"model_type": "qwen3"})
    with pytest.raises(ValueError, match="unsupported model_type None"):
        ModelConfig.from_hf({})
    with pytest.raises(TypeError, match="expected the dict of a config.json, got str .from_pretrained reads a folder"):
        ModelConfig.from_hf("config.json")


def test_from_hf_defaults_follow_each_class():
    assert ModelConfig.from_hf(HF).head_dim == 8  # hidden / heads
    assert ModelConfig.from_hf({**HF, "head_dim": None}).head_dim == 8
    assert ModelConfig.from_hf({**HF, "model_type": "qwen3"}).head_dim == 128
    plain = {key: value for key, value in HF.items() if key != "num_key_value_heads"}
    assert ModelConfig.from_hf(plain).num_kv_heads == 4
    assert ModelConfig.from_hf(HF).rope_theta == 10000.0
    assert not ModelConfig.from_hf(HF).tie_word_embeddings
    assert ModelConfig.from_hf({**HF, "model_type": "qwen2"}).qkv_bias
    assert ModelConfig.from_hf({**HF, "model_type": "qwen3"}).qk_norm


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
    ],
)
def test_from_hf_reads_every_rope_spelling(change):
    config = ModelConfig.from_hf({**HF, **change})
    assert (config.rope_theta, config.rope_scaling) == (500.0, SCALING)


@pytest.mark.parametrize(
    ("change", "dtype", "field", "expected"),
    [
        ({}, None, "dtype", "float32"), ({"torch_dtype": "bfloat16"}, None, "dtype", "bfloat16"),
        ({"dtype": "bfloat16"}, None, "dtype", "bfloat16"), ({"torch_dtype": "float16"}, None, "dtype", "float32"),
        ({"torch_dtype": "bfloat16"}, "float32", "dtype", "float32"), ({"eos_token_id": None}, None, "eos_token_ids", ()),
        ({"eos_token_id": 3}, None, "eos_token_ids", (3,)), ({"eos_token_id": [3, 5]}, None, "eos_token_ids", (3, 5)),
    ],
)  # fmt: skip
def test_from_hf_takes_every_dtype_and_one_or_several_end_tokens(change, dtype, field, expected):
    assert vars(ModelConfig.from_hf({**HF, **change}, dtype))[field] == expected


# Parameter counts as the model cards and checkpoints have them.
PRESETS = {
    "llama3_8b": 8_030_261_248, "llama31_8b": 8_030_261_248, "llama31_70b": 70_553_706_496, "llama32_1b": 1_235_814_400,
    "qwen3_8b": 8_190_735_360, "qwen3_4b": 4_022_468_096, "qwen3_0_6b": 596_049_920,
    "qwen25_7b": 7_615_616_512, "mistral_7b": 7_248_023_552, "yi_6b": 6_061_035_520,
    "deepseek_v2_lite": 15_706_484_224,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_number_of_parameters(name):
    make = vars(shapes)[name]
    leaves = jax.tree.leaves(models.param_shapes(make()))  # eval_shape: nothing is allocated
    assert sum(math.prod(leaf.shape) for leaf in leaves) == PRESETS[name]
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("bfloat16")}
    assert make("float32").dtype == "float32"


@pytest.mark.parametrize("name", [*FAMILIES, *PRESETS])
def test_to_hf_round_trip(name):
    config = FAMILIES[name] if name in FAMILIES else vars(shapes)[name]()
    hf = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(hf) == config
    expected = {"qwen2": "qwen2", "qwen25_7b": "qwen2", "untiled_heads": "mistral", "deepseek_v2_lite": "deepseek_v2"}
    assert hf["model_type"] == expected.get(name, "qwen3" if name.startswith("qwen3") else "llama")


def test_config_is_a_static_argument():
    config = FAMILIES["qwen3"]
    assert config == dataclasses.replace(config) and hash(config) == hash(dataclasses.replace(config))
    assert config.group_size == 2
    params = vivid_params(config)
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def step(config, params):
        traces.append(config)
        return run(config, params, TOKENS)

    step(config, params)
    step(dataclasses.replace(config), params)
    assert len(traces) == 1


# Fields whose effect is elsewhere: the cache's capacity check and the end of generation.
READ_BY_KVJAX = {"max_position_embeddings", "eos_token_ids"}
CHANGES = {
    "vocab_size": 80, "hidden_size": 48, "intermediate_size": 64, "num_layers": 3, "num_q_heads": 8,
    "num_kv_heads": 1, "head_dim": 8, "rms_norm_eps": 1e-2, "rope_theta": 50.0, "rope_scaling": SCALING,
    "tie_word_embeddings": True, "qkv_bias": True, "qk_norm": True, "dtype": "bfloat16",
    "ropes": (LayerRope(theta=1e4), LayerRope(theta=1e4, rotated=0)),
    "experts": Experts(
        num_experts=4, num_experts_per_tok=2, intermediate_size=48, norm_topk_prob=True, layers=(0, 1)
    ),
    "windows": (None, 5), "output_gate": True, "attention_sinks": True, "out_bias": True, "mlp_gate": False,
    "latent": Latent(rank=10, rotated=6, key_dim=8, value_dim=12),
    "linear": LinearLayers(
        num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4, layers=(0,)
    ),
    "wide_qk_norm": True, "norm_place": "after", "norm": "layer", "activation": "gelu", "query_scale": 0.3,
    "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_softcap": 2.0,
    "logits_multiplier": 0.5, "logit_softcap": 2.0, "family": "olmo2",
}  # fmt: skip
PARTS = tuple(CHANGES)[-11:]
WITH = {  # what else a field needs
    "latent": {"num_kv_heads": 1, "query_scale": 0.3, "ropes": (LayerRope(theta=1e4, rotated=6),) * 2}
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig) if f.name not in READ_BY_KVJAX])
def test_no_field_is_dead(field):
    """A field changes either the parameters (and then every one of them is used: next test) or the logits."""
    base = FAMILIES["llama"]
    changed = dataclasses.replace(base, **{field: CHANGES[field], **WITH.get(field, {})})
    if field == "family":  # the names of the files' tensors
        assert checkpoint_table(base) != checkpoint_table(changed)
    elif field in PARTS:  # their values are compared with transformers' (test_families.py)
        programs = [str(jax.make_jaxpr(functools.partial(run, c))(models.param_shapes(c), TOKENS)) for c in (base, changed)]
        assert programs[0] != programs[1]
    elif field in ("rms_norm_eps", "rope_theta", "rope_scaling", "ropes", "dtype", "windows"):
        params = vivid_params(base)
        difference = jnp.abs(run(base, params, TOKENS) - run(changed, params, TOKENS)).max()
        assert difference > 1e-3
    else:
        shapes = [jax.tree.map(lambda leaf: leaf.shape, models.param_shapes(c)) for c in (base, changed)]
        assert shapes[0] != shapes[1]
        logits = jax.eval_shape(functools.partial(run, changed), models.param_shapes(changed), TOKENS)
        assert logits.shape == (2, 24, changed.vocab_size)


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3_tied", marks=pytest.mark.thorough)])
def test_bfloat16_trains_every_float32_parameter(family):
    config = dataclasses.replace(FAMILIES[family], dtype="bfloat16")

    @jax.jit
    def gradient(params):
        return jax.grad(lambda p: -jax.nn.log_softmax(run(config, p, TOKENS))[..., 0].mean())(params)

    for leaf in jax.tree.leaves(gradient(vivid_params(FAMILIES[family]))):
        assert leaf.dtype == jnp.float32 and jnp.isfinite(leaf).all() and jnp.abs(leaf).max() > 0


@pytest.mark.parametrize("family", ["untiled_heads", "qwen3_tied"])
def test_last_is_a_slice_of_all_positions(family):
    config = FAMILIES[family]
    params = vivid_params(config)
    every = run(config, params, TOKENS)
    last = jnp.array([5, 23], jnp.int32)
    assert every.shape == (2, 24, config.vocab_size) and every.dtype == jnp.float32
    picked = run(config, params, TOKENS, last)
    np.testing.assert_allclose(picked, every[jnp.arange(2), last], rtol=1e-5, atol=1e-5)


def test_head_runs_on_one_position_only():
    config = dataclasses.replace(FAMILIES["llama"], vocab_size=4096)
    arguments = (models.param_shapes(config), jax.ShapeDtypeStruct((1, 512), jnp.int32))
    last = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = run.lower(config, *arguments, last)
    assert "512x4096" not in lowered.as_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attend_sees_grouped_heads_in_the_compute_dtype_and_states_are_threaded(dtype):
    config = dataclasses.replace(FAMILIES["qwen3"], dtype=dtype)
    params = vivid_params(FAMILIES["qwen3"])  # stored in float32 either way
    seen = []

    def attend(layer, state, q, k, v):
        seen.append((layer, state, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype))
        return q, state + 10

    logits, states = config.apply(params, TOKENS, attend, (1, 2), last=jnp.array([0, 3], jnp.int32))
    shapes = (2, 2, 2, 24, 16), (2, 2, 24, 16), (2, 2, 24, 16)
    assert seen == [(i, i + 1, *shapes, *(jnp.dtype(dtype),) * 3) for i in range(2)]
    assert states == (11, 12)
    assert logits.dtype == jnp.float32 and logits.shape == (2, config.vocab_size)


def test_query_heads_are_grouped_as_in_the_checkpoint(tmp_path):
    """Query head kv * G + g of the file reaches q[:, kv, g]."""
    config = FAMILIES["llama"]
    params = vivid_params(config)
    models.save_pretrained(tmp_path, params, config)
    file = load_file(tmp_path / "model.safetensors")
    seen = {}

    def attend(layer, state, q, k, v):
        seen[layer] = q, k, v
        return q, state

    config.apply(params, TOKENS, attend, (None, None))
    x = np.asarray(params["embed"]["embedding"])[np.asarray(TOKENS)]
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps)
    x = x * np.asarray(params["layers_0"]["attention_norm"]["scale"])
    for index, name in enumerate("qkv"):
        heads = x @ file[f"model.layers.0.self_attn.{name}_proj.weight"].T
        heads = heads.reshape(2, 24, -1, config.head_dim).swapaxes(1, 2)  # [B, heads, T, D]
        got = np.asarray(seen[0][index]).reshape(heads.shape)  # q: [B, H, G, T, D], H outermost
        np.testing.assert_allclose(got, heads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", [{}, {"qk_norm": False, "wide_qk_norm": True, "query_scale": 0.3, "norm_place": "after"}])
def test_a_guess_is_what_the_layer_makes_of_the_input_of_the_layer_before(parts):
    """With bias, norm and scale: it is the query of layer 0 if that has the projections of layer 1."""
    config = dataclasses.replace(FAMILIES["qwen3"], qkv_bias=True, **parts)
    params = vivid_params(config)
    seen = []

    def attend(layer, state, q, k, v, *guess):
        seen.append((q, *guess))
        return q, state

    swapped = {**params, "layers_0": {**params["layers_0"], "attention": params["layers_1"]["attention"]}}
    for given, guess in ((params, (1,)), (swapped, ())):
        config.apply(given, TOKENS, attend, (None, None), guess=guess)
    assert [len(given) for given in seen] == [1, 2, 1, 1]
    np.testing.assert_allclose(seen[1][1], seen[2][0], atol=1e-5, rtol=0)
    assert not np.allclose(seen[1][1], seen[1][0], atol=0.1)


def test_bfloat16_stays_near_float32():
    config = FAMILIES["qwen3"]
    params = vivid_params(config)
    exact = run(config, params, TOKENS)
    rounded = run(dataclasses.replace(config, dtype="bfloat16"), params, TOKENS)
    assert 1e-4 < jnp.abs(exact - rounded).mean() < 0.05 * jnp.abs(exact).mean()


def test_a_single_row_is_two_equal_rows_where_xla_would_multiply_and_reduce():
    """On a GPU, in 16 bits, and by a small matrix; the product is the same either way."""
    seen = []

    def product(x):
        seen.append(x.shape[1])
        return x @ jnp.ones((4, width), x.dtype) + x.sum(axis=2, keepdims=True)

    x = jnp.arange(4, dtype=jnp.bfloat16)[None, None]
    for machine, rows, width, expected in (
        (Machine("gpu", (9, 0)), x, 8, 2),
        (Machine("gpu", (9, 0)), x.astype(jnp.float32), 8, 1),
        (Machine("gpu", (9, 0)), x, 2_500_000, 1),
        (Machine("gpu", (9, 0)), jnp.tile(x, (1, 3, 1)), 8, 3),
        (Machine("cpu"), x, 8, 1),
    ):
        with assume_machine(machine.platform, machine.capability):
            out = jax.eval_shape(functools.partial(multiplied, product, width=width), rows)
            assert seen[-1] == expected
            assert out.shape == (1, rows.shape[1], width)
            if width == 8:
                np.testing.assert_array_equal(multiplied(product, rows, width), product(rows))


def test_token_past_the_vocabulary_gives_nan_not_another_row():
    config = FAMILIES["llama"]
    tokens = TOKENS.at[1, 4].set(config.vocab_size)
    logits = run(config, vivid_params(config), tokens)
    assert jnp.isfinite(logits[0]).all() and jnp.isnan(logits[1, 4]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[0]}, "tokens must be integers of shape [B, T], got int32 (24,)"),
        ({"tokens": TOKENS.astype(jnp.float32)}, "tokens must be integers of shape [B, T], got float32 (2, 24)"),
        ({"states": (None,)}, "expected one state for each of 2 layers, got 1"),
        ({"last": jnp.zeros((3,), jnp.int32)}, "last must have shape (2,), one index per row, got (3,)"),
        ({"attend": lambda layer, state, q, k, v: (k, state)}, "attend returned shape (2, 2, 24, 16) at layer 0, expected"),
    ],
)
def test_wrong_arguments_of_apply_are_refused(change, message):
    config = FAMILIES["llama"]
    call = {"tokens": TOKENS, "attend": dense_attend(config), "states": (None, None), "last": None, **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        config.apply(vivid_params(config), **call)
