"""Adapters: merging, stretching, files, and that an adapter refuses another base."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models.files import adapter
from tests.models.test_latent import CONFIG as WITH_LATENT
from tests.models.test_weights import CONFIGS
from tests.tiny_models import factors_of, vivid_params

pytestmark = pytest.mark.usefixtures("quick_compile")  # tests/models/test_parity.py compiles as users do

CONFIG = models.ModelConfig(
    vocab_size=64, hidden_size=16, intermediate_size=24, num_layers=2, num_q_heads=2, num_kv_heads=1, head_dim=8,
    max_position_embeddings=128, tie_word_embeddings=True, eos_token_ids=(0,),
)  # fmt: skip


@pytest.fixture(scope="module")
def params():
    return vivid_params(CONFIG)


@pytest.fixture(scope="module")
def factors(params):
    return jax.tree.map(jnp.asarray, factors_of(params))


def about(params, **changed):
    given = adapter.AdapterConfig(base="tiny", fingerprint=adapter.fingerprint(params), rank=3, stretch=2.0)
    return dataclasses.replace(given, **changed)


def leaf(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return np.asarray(tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_kernels_are_the_sum(params, factors, dtype):
    given = jax.tree.map(lambda x: x.astype(dtype), params)
    merged = adapter.merge_adapter(given, factors)
    for layer in range(CONFIG.num_layers):
        for path in adapter.KERNELS:
            kernel = leaf(given[f"layers_{layer}"], path)
            a, b = (leaf(factors, path.removesuffix("kernel") + name)[layer].astype(np.float64) for name in "ab")
            expected = kernel.astype(np.float64) + (a @ b).reshape(kernel.shape)
            got = leaf(merged[f"layers_{layer}"], path)
            assert got.dtype == kernel.dtype and not np.array_equal(got, kernel)
            tolerance = 1e-6 if dtype == "float32" else 2.0**-8
            np.testing.assert_allclose(got.astype(np.float64), expected, rtol=tolerance, atol=1e-6)
    assert merged["embed"]["embedding"] is given["embed"]["embedding"]  # shared, not copied


def test_saved_adapter_is_applied(tmp_path, params, factors):
    adapter.save_adapter(tmp_path, factors, about(params))
    got, config = adapter.apply_adapter(params, CONFIG, tmp_path)
    expected = adapter.merge_adapter(params, jax.tree.map(lambda x: x.astype(jnp.bfloat16), factors))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert config == adapter.stretched(CONFIG, 2.0) and config.max_position_embeddings == 256
    assert config.rope_scaling.factor == 2 and config.rope_scaling.original_max_position_embeddings == 128
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


def test_fingerprint_tells_models_apart(params):
    assert adapter.fingerprint(params) == adapter.fingerprint(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    other = jax.tree.map(lambda x: x, params)
    other["layers_1"]["mlp_norm"]["scale"] = 1.01 * params["layers_1"]["mlp_norm"]["scale"]
    assert adapter.fingerprint(other) != adapter.fingerprint(params)
    wider = vivid_params(dataclasses.replace(CONFIG, vocab_size=65))
    assert adapter.fingerprint(wider) != adapter.fingerprint(params)


def test_adapter_of_another_base_is_refused(tmp_path, params, factors):
    adapter.save_adapter(tmp_path, factors, about(params, base="smollm2", fingerprint="0" * 16))
    with pytest.raises(ValueError, match=r"was trained on smollm2 \(fingerprint 0{16}\), and cannot be applied"):
        adapter.apply_adapter(params, CONFIG, tmp_path)
    codes = models.param_shapes(CONFIG, "int8")
    with pytest.raises(TypeError, match="an adapter needs parameters as numbers, got codes: from_pretrained adds it before"):
        adapter.apply_adapter(codes, CONFIG, tmp_path)


def test_damaged_adapters_are_named(tmp_path, params, factors):
    with pytest.raises(FileNotFoundError, match="no adapter_model.safetensors in"):
        adapter.load_adapter(tmp_path)
    broken = jax.tree.map(jnp.asarray, factors)
    broken["mlp"]["down"]["b"] = broken["mlp"]["down"]["b"].at[1, 0, 0].set(jnp.nan)
    adapter.save_adapter(tmp_path, broken, about(params))
    with pytest.raises(ValueError, match="mlp/down/b has values that are not finite"):
        adapter.load_adapter(tmp_path)
    adapter.save_adapter(tmp_path, factors, about(params))
    weights = tmp_path / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="adapter_model.safetensors is damaged"):
        adapter.load_adapter(tmp_path)
    weights.write_bytes(whole)
    wrong = (("base", 1), ("fingerprint", None), ("rank", 0), ("stretch", "2"), ("stretch", float("inf")))
    described = [({"base": "x", "rank": 3}, "fingerprint, stretch")]
    described += [({**dataclasses.asdict(about(params)), name: x}, f"{name} must be ") for name, x in wrong]
    for content, told in described:
        (tmp_path / "adapter_config.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"adapter_config.json.* {told}"):
            adapter.load_adapter(tmp_path)


def test_factors_of_another_shape_are_refused(params, factors):
    for changed, told in (
        (jax.tree.map(lambda x: x[:1], factors), r"attention/qkv/a: got \[1, 16, 3\], expected \[2, 16, 3\]"),
        ({**factors, "mlp": {**factors["mlp"], "down": {**factors["mlp"]["down"], "a": jnp.float32(1)}}},
         r"mlp/down/a: got \[\], expected"),
        ({**factors, "mlp": {"gate_up": factors["mlp"]["gate_up"]}}, "missing mlp/down/a; missing mlp/down/b"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=told):
            adapter.merge_adapter(params, changed)


@pytest.mark.parametrize("part", ["experts", "latent attention"])
def test_a_model_without_one_matrix_for_each_projection_is_refused(part):
    config = CONFIGS["mixtral"] if part == "experts" else WITH_LATENT
    params = vivid_params(config)
    with pytest.raises(ValueError, match=f"the model has {part}"):
        adapter.merge_adapter(params, {"attention": {}})


def test_stretching_leaves_fast_frequencies(params):
    assert adapter.stretched(CONFIG, 1.0) is CONFIG
    with pytest.raises(ValueError, match="can be stretched once"):
        adapter.stretched(adapter.stretched(CONFIG, 2.0), 2.0)
