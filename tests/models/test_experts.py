"""Mixtures of experts: the three ways against float64 loops, config.json, checkpoints, and the bytes that a step reads."""

from __future__ import annotations

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models
from models import ModelConfig
from models.files.adapter import init_adapter, merge_adapter
from models.layers.experts import all_experts, grouped, mix, one_by_one, route
from models.sizes.experts import Experts
from tests.models.test_published import PUBLISHED
from tests.tiny_models import HF, TINY, vivid_params

SPARSE = Experts(num_experts=4, num_experts_per_tok=2, intermediate_size=24, norm_topk_prob=False, layers=(1,))
EVERY = Experts(num_experts=4, num_experts_per_tok=2, intermediate_size=48, norm_topk_prob=True, layers=(0, 1))
QWEN = ModelConfig(**TINY, qk_norm=True, experts=SPARSE)
MIXTRAL = ModelConfig(**TINY, experts=EVERY, tie_word_embeddings=True)
MOE = {**HF, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def oracle(x, router, gate_up, down, k, normalised):
    """The block in float64 loops: for each token the k most probable experts, one after the other."""
    x, router, gate_up, down = (np.asarray(a, np.float64) for a in (x, router, gate_up, down))
    out = np.zeros_like(x)
    for n, token in enumerate(x):
        odds = np.exp(token @ router)
        odds = odds / odds.sum()
        best = sorted(range(len(odds)), key=lambda e: -odds[e])[:k]
        total = sum(odds[e] for e in best) if normalised else 1.0
        for e in best:
            gate, up = np.einsum("d,dgf->gf", token, gate_up[e])
            out[n] += odds[e] / total * ((gate / (1 + np.exp(-gate)) * up) @ down[e])
    return out


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("normalised", [True, False])
def test_every_way_is_the_definition(normalised):
    rng = np.random.default_rng(3)
    shapes = (7, 8), (8, 5), (5, 8, 2, 6), (5, 6, 8)
    x, router, gate_up, down = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    experts = Experts(num_experts=5, num_experts_per_tok=3, intermediate_size=6, norm_topk_prob=normalised, layers=(0,))
    chosen, weight = route(x, router, experts)
    want = oracle(x, router, gate_up, down, 3, normalised)
    for way in (one_by_one, grouped, all_experts) if normalised else (all_experts,):
        got = way(x, chosen, weight, gate_up, down)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5, err_msg=way.__name__)


@pytest.mark.parametrize(("tokens", "ragged"), [(2, {"cpu": 0, "cuda": 0, "tpu": 0}), (3, {"cpu": 0, "cuda": 2, "tpu": 2})])
def test_the_way_depends_on_tokens_and_platform(tokens, ragged):
    """Up to as many choices as experts, each reads its expert; more are grouped, but not on a CPU. Nothing compiles."""
    shapes = [(tokens, 8), (tokens, 2), (tokens, 2), (4, 8, 2, 6), (4, 6, 8)]
    dtypes = [jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.float32]
    traced = jax.jit(mix).trace(*map(jax.ShapeDtypeStruct, shapes, dtypes))
    for platform, count in ragged.items():
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count('"chlo.ragged_dot"') == count, platform


@pytest.mark.parametrize(
    ("change", "layers"),
    [
        ({"num_experts": 4}, (0, 1)),
        ({"num_local_experts": 4}, (0, 1)),
        ({"num_experts": 4, "num_local_experts": 4, "mlp_only_layers": [0]}, (1,)),
        ({"num_experts": 4, "decoder_sparse_step": 2}, (1,)),
        ({"num_experts": 4, "mlp_only_layers": None, "decoder_sparse_step": 3, "num_hidden_layers": 7}, (2, 5)),
    ],
)
def test_qwen_experts_are_read(change, layers):
    config = ModelConfig.from_hf({**MOE, "model_type": "qwen3_moe", "head_dim": 16, **change})
    assert config.experts == Experts(
        num_experts=4, num_experts_per_tok=2, intermediate_size=24, norm_topk_prob=False, layers=layers
    )
    assert config.qk_norm and ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert config.to_hf()["model_type"] == "qwen3_moe"


def test_a_mixture_without_layers_is_dense():
    for change in ({"num_experts": 0}, {"num_experts": 4, "mlp_only_layers": [0, 1]}):
        assert ModelConfig.from_hf({**MOE, "model_type": "qwen3_moe", **change}).experts is None


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_mixtral_experts_are_read(key):
    config = ModelConfig.from_hf({**HF, "model_type": "mixtral", "head_dim": 16, "num_experts_per_tok": 2, key: 4})
    assert config.experts == EVERY
    assert (config.rope_theta, config.rms_norm_eps) == (1e6, 1e-5)  # defaults of Mixtral's class
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    assert (written["model_type"], written["architectures"]) == ("mixtral", ["MixtralForCausalLM"])


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (MIXTRAL, "float32"),
        (QWEN, "bfloat16"),
        (QWEN, "float16"),
        pytest.param(MIXTRAL, "bfloat16", marks=pytest.mark.thorough),
        pytest.param(MIXTRAL, "float16", marks=pytest.mark.thorough),
        pytest.param(QWEN, "float32", marks=pytest.mark.thorough),
    ],
)
def test_checkpoints_in_both_directions(config, dtype, tmp_path):
    params = vivid_params(config)
    models.save_pretrained(tmp_path, params, config, None if dtype == "float16" else dtype)
    file, about = tmp_path / "model.safetensors", tmp_path / "config.json"
    names = load_file(file)
    block = "mlp.experts.3.up_proj" if config is QWEN else "block_sparse_moe.experts.3.w3"
    up = names[f"model.layers.1.{block}.weight"]
    kernel = np.asarray(params["layers_1"]["mlp"]["gate_up"]["kernel"])[3, :, 1]
    np.testing.assert_allclose(up.astype(np.float32), kernel.T, rtol=1e-2)
    if dtype == "float16":
        save_file({name: x.astype(np.float16) for name, x in names.items()}, file)
        about.write_text(json.dumps({**json.loads(about.read_text()), "torch_dtype": "float16"}))
    again, read = models.from_pretrained(tmp_path)
    assert read.experts == config.experts and read.dtype == ("float32" if dtype == "float16" else dtype)
    storage = {"bfloat16": jnp.bfloat16, "float16": jnp.float16}.get(dtype, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again, jax.tree.map(lambda x: x.astype(storage).astype(read.dtype), params))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "mixtral-8x7b"])
def test_published_models_and_the_bytes_of_a_step(name):
    count, hf = PUBLISHED[name]["parameters"], PUBLISHED[name]["config"]
    whole = ModelConfig.from_hf(hf)
    config = ModelConfig.from_hf({**hf, "num_hidden_layers": 2})  # the others are like the second
    params = models.param_shapes(config)
    sizes = {name: sum(math.prod(x.shape) for x in jax.tree.leaves(part)) for name, part in params.items()}
    assert sum(sizes.values()) + (whole.num_layers - 2) * sizes["layers_1"] == count
    experts, width = config.experts, config.hidden_size
    table = (config.vocab_size - 1) * width * 2  # rows of the embedding that one token does not read
    one_expert = 3 * experts.intermediate_size * width * 2  # bytes: gate, up and down in bfloat16
    unread = 2 * one_expert * (experts.num_experts - experts.num_experts_per_tok)
    assert config.weight_bytes(params, 1) == 2 * sum(sizes.values()) - table - unread
    # Two rows share an expert as often as chance has it.
    chance = (1 - experts.num_experts_per_tok / experts.num_experts) ** 2
    two = 2 * sum(sizes.values()) - table + width * 2 - chance * 2 * one_expert * experts.num_experts
    assert config.weight_bytes(params, 2) == pytest.approx(two, abs=1)


@pytest.mark.thorough
def test_experts_change_the_logits_and_have_gradients():
    params, tokens = vivid_params(MIXTRAL), jnp.ones((1, 3), jnp.int32)

    @jax.jit
    def loss(params):
        return MIXTRAL.apply(params, tokens, lambda layer, state, q, k, v: (q, state), (None,) * 2)[0].std()

    gradient = jax.grad(loss)(params)["layers_0"]["mlp"]
    assert all(jnp.abs(gradient[name]["kernel"]).max() > 0 for name in ("router", "gate_up", "down"))


def test_adapters_refuse_experts():
    with pytest.raises(ValueError, match="the adapter does not fit the model: the model has experts"):
        merge_adapter(vivid_params(MIXTRAL), {"attention": {}})
    with pytest.raises(ValueError, match="one matrix for each projection, got a model with experts"):
        init_adapter(vivid_params(MIXTRAL), 2, 4, jax.random.key(0))
