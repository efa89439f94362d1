"""The parts of a layer: what they add to a program, what they refuse, and their norms. `tests/mesh` runs them on meshes."""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import models
from models import ModelConfig
from models.layers.modules import layer_norm
from models.layers.transformer import Table, wide_qk_norm
from tests.tiny_models import FAMILIES, TINY

PLAIN = {  # operations of one layer of Llama, with an attention that computes nothing
    "dot_general": 4, "custom_jvp_call": 2, "jit": 1, "mul": 1, "reshape": 2, "slice": 5, "squeeze": 4, "transpose": 4,
}  # fmt: skip


def operations(config, layers):
    """How often each operation stands in the program of ``layers`` layers of the decoder, the ends of the model included."""
    config = dataclasses.replace(config, num_layers=layers)

    def run(params, tokens):
        return config.apply(params, tokens, lambda layer, state, q, k, v: (q, state), (None,) * layers)

    program = jax.make_jaxpr(run)(models.param_shapes(config), jax.ShapeDtypeStruct((1, 3), jnp.int32))
    return collections.Counter(equation.primitive.name for equation in program.jaxpr.eqns)


def test_parts_at_their_defaults_add_no_operation():
    """A layer of Llama has four products, two norms with their additions, a gate, and reshapes; Qwen2 adds its bias."""
    two, three = operations(FAMILIES["llama"], 2), operations(FAMILIES["llama"], 3)
    assert three - two == PLAIN
    ends = two - collections.Counter({name: 2 * count for name, count in PLAIN.items()})
    assert sum(ends.values()) <= 12 and not {"tanh", "erf", "concatenate"} & set(two), ends
    bias = operations(FAMILIES["qwen2"], 3) - operations(FAMILIES["qwen2"], 2)
    assert bias - collections.Counter(PLAIN) == {"add": 1, "reshape": 1}


def changed(**fields):
    return dataclasses.replace(FAMILIES["llama"], **fields)


def test_layer_norm_equals_numpy():
    rng = np.random.default_rng(0)
    x, scale = rng.normal(3, 2, (2, 5, 8)), rng.normal(1, 0.2, 8)
    got = layer_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 1e-5)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
    assert layer_norm(jnp.asarray(x, jnp.bfloat16), jnp.asarray(scale), 1e-5).dtype == jnp.bfloat16


def wide_norm(qkv, of_query, of_key, eps):
    """The norm of all query heads together, and of all key heads, in float64."""
    made = qkv.copy()
    for part, scale in ((slice(0, -2), of_query), (slice(-2, -1), of_key)):
        flat = qkv[..., part, :].reshape(*qkv.shape[:2], -1)
        flat = flat / np.sqrt((flat**2).mean(-1, keepdims=True) + eps) * scale
        made[..., part, :] = flat.reshape(made[..., part, :].shape)
    return made


def test_the_norm_over_all_heads_equals_numpy():
    rng = np.random.default_rng(1)
    qkv, of_query, of_key = rng.normal(size=(2, 3, 4, 4, 6)), rng.normal(1, 0.2, 4 * 2 * 6), rng.normal(1, 0.2, 4 * 6)
    given = [jnp.asarray(x, jnp.float32) for x in (qkv, of_query, of_key)]
    np.testing.assert_allclose(wide_qk_norm(*given, 1e-6), wide_norm(qkv, of_query, of_key, 1e-6), rtol=0, atol=2e-6)


def test_final_logits_are_scaled_and_capped():
    plain, table = FAMILIES["llama"], jax.random.normal(jax.random.key(0), (FAMILIES["llama"].vocab_size, 32))
    config = dataclasses.replace(plain, logits_multiplier=0.5, logit_softcap=4.0)
    x = jax.random.normal(jax.random.key(1), (2, 32))
    logits, capped = (Table(each).apply({"params": {"embedding": table}}, x, method="logits") for each in (plain, config))
    np.testing.assert_allclose(capped, 4 * np.tanh(np.asarray(logits) * 0.5 / 4), rtol=1e-6)


def test_the_default_config_has_no_part():
    config = ModelConfig(**TINY)
    assert config.ropes == () and config.norm_place == "before" and config.query_scale is None and config.family == ""
