"""Mixtures of experts: the three ways against float64 loops, config.json, checkpoints, and the bytes that a step reads."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from models import ModelConfig
from models.layers.experts import all_experts, grouped, mix, one_by_one, route
from models.sizes.experts import Experts
from tests.models.test_config_files import PUBLISHED


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
