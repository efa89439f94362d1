"""Reverse and forward mode through `prefill`, `extend` and `decode_step`, as soft prompts and saliency need it.

The loss is a sum of logits after two decoded tokens, in a model of one layer. Its derivative along a direction is compared
with the difference of two losses in float64, whose attention is computed by the oracles.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.quantised import KV_DTYPES
from kvjax.rope import inverse_frequencies
from kvjax.testing.model import TinyModel
from pallas_kernels.machine import assume_machine
from tests.harness import METHODS, example, oracle, repeated

pytestmark = pytest.mark.usefixtures("quick_compile")

MODEL = TinyModel(num_layers=1, head_dim=16, hidden_size=24)
PROMPT = 40
TOKENS = np.random.default_rng(5).integers(0, MODEL.vocab_size, PROMPT + 2)
RUN = ("quest", "h2o")  # one of each kind; other methods under --thorough
# Their oracles do not attend as a layer of this model does: budgets and scores of two layers, sentences, a given basis.
OTHERS = (
    "attentionmatching", "duoattention", "headkv", "kvgrad", "kvzip", "oracleeviction", "pyramidkv", "sentencekv", "shadowkv",
)  # fmt: skip


def float64_loss(params, name):
    """The loss of `loss`, by NumPy and the oracle."""
    heads, group, dim = MODEL.num_kv_heads, MODEL.num_q_heads // MODEL.num_kv_heads, MODEL.head_dim

    def normed(x):
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)

    x = params["embed"][TOKENS]
    (layer,) = params["layers"]
    rows = (normed(x) @ layer["qkv"]).reshape(len(x), -1, dim).swapaxes(0, 1)
    q, k, v = np.split(rows, (heads * group, heads * (group + 1)))
    q = q.reshape(heads, group, len(x), dim)
    angles = np.asarray(inverse_frequencies(dim, MODEL.rope_theta, None), np.float64)
    last = oracle(name).run(q, k, v, PROMPT, angles, **oracle(name).KNOBS).outputs[-1]
    return (normed(x[-1] + last.reshape(-1) @ layer["out"]) @ params["head"])[:7].sum()


def loss(params, method, config=MODEL):
    cache = kvjax.prefill(params, TOKENS[None, :PROMPT], config=config, method=method, max_new_tokens=4, pad_multiple=1)
    for token in TOKENS[PROMPT:]:
        cache = kvjax.decode_step(params, cache, token[None])
    return cache.logits[0, :7].sum()


@pytest.mark.parametrize("name", repeated([x for x in METHODS if x.values[0] not in OTHERS], but=RUN))
def test_gradients_equal_float64_differences(name):
    params = MODEL.random_params(3)
    rng = np.random.default_rng(4)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    along = jax.tree.map(lambda x: rng.normal(size=x.shape) / np.sqrt(x.size), wide)
    ends = [float64_loss(jax.tree.map(lambda x, d, h=h: x + h * d, wide, along), name) for h in (1e-5, -1e-5)]
    of = functools.partial(loss, method=example(name))
    made = jax.jit(jax.grad(of))(params)
    got = sum(jax.tree.leaves(jax.tree.map(lambda x, d: (np.asarray(x, np.float64) * d).sum(), made, along)))
    ahead = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), along)
    _, forward = jax.jit(lambda params: jax.jvp(of, (params,), (ahead,)))(params)
    np.testing.assert_allclose([got, forward], [(ends[0] - ends[1]) / 2e-5] * 2, rtol=2e-3, atol=2e-3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", OTHERS)
def test_gradients_are_finite(name):
    config = dataclasses.replace(MODEL, num_layers=2)
    made = jax.jit(jax.grad(functools.partial(loss, method=example(name), config=config)))(config.random_params(3))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(made)) and np.any(made["layers"][0]["qkv"])


@pytest.mark.slow
def test_gradients_do_not_depend_on_chunks():
    """Loops over groups of rows and over chunks of a prompt and of a question are as long as they must be."""
    params = MODEL.random_params(3)
    rows = TOKENS[None, :12].repeat(3, 0)

    def asked(params, chunk, method):
        sizes = {"max_new_tokens": 8, "chunk_size": chunk, "pad_multiple": 1}
        cache = kvjax.prefill(params, rows, config=MODEL, method=method, **sizes)
        return kvjax.extend(params, cache, rows[:, :5], lengths=[5, 3, 0]).logits[:, :7].sum()

    want, got = (jax.jit(jax.grad(functools.partial(asked, chunk=chunk, method="full")))(params) for chunk in (64, 4))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_a_kernel_says_in_one_sentence_that_it_has_no_derivative():
    params = MODEL.random_params(3)
    grad = jax.grad(functools.partial(loss, method="quest"))
    with assume_machine("gpu", (9, 0)):
        with pytest.raises(NotImplementedError, match="kernel 'pallas_triton' has no derivative: differentiate plain JAX"):
            jax.eval_shape(grad, params)
        with kvjax.default_implementation("xla"):
            made = jax.eval_shape(grad, params)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, params)


@pytest.mark.parametrize("kind", KV_DTYPES)
def test_a_cache_of_codes_says_that_it_has_no_derivative(kind):
    """By what keys come from; the derivative by the head, behind all layers, is that of the rounded values."""
    params = MODEL.random_params(3)

    def of(part, name):
        cache = kvjax.prefill({**params, name: part}, TOKENS[None, :8], config=MODEL, max_new_tokens=4, kv_dtype=kind)
        return kvjax.decode_step({**params, name: part}, cache, [1]).logits.sum()

    with pytest.raises(NotImplementedError, match="stored as codes have no derivative: differentiate with kv_dtype=None"):
        jax.eval_shape(jax.grad(functools.partial(of, name="embed")), params["embed"])
    assert jax.eval_shape(jax.grad(functools.partial(of, name="head")), params["head"]).shape == params["head"].shape
