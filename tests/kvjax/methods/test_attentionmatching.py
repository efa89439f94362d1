"""Attention Matching: what it keeps and fits, against the oracle on recorded q, k and v."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.attention.over_cache import attend_all, attend_held
from kvjax.cache.packed_keys import biased
from kvjax.methods import AttentionMatching, attentionmatching
from kvjax.testing.layer import random_tokens
from pallas_kernels.soft_cap import soft_cap
from tests import tape
from tests.harness import repeated, small
from tests.oracles import attentionmatching as oracle

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("attentionmatching")]
STEPS = 3
ROWS, TOTAL = len(oracle.LENGTHS), max(oracle.LENGTHS) + 10
SETTINGS = {
    "as it is": {},
    "more slots than queries": {"queries": 7, "ridge": 0.1},
    "layer by layer": {"layerwise": True},
    "at once, no first tokens": {"chunk": 50, "num_sink": 0, "budget": 9, "head_factor": 1.0},
}


@functools.cache
def recording():
    """A tape and its parameters: two layers of two KV heads, a row for each length."""
    q, k, v = (x.reshape(2, ROWS, *x.shape[1:]) for x in random_tokens(1, 2 * ROWS, 2, 2, TOTAL, 8))
    logits = np.random.default_rng(2).normal(size=(ROWS, TOTAL, TOTAL))
    return tape.record(*(np.asarray(x, np.float32) for x in (q, k, v, logits)))


@pytest.mark.parametrize("name", repeated([pytest.param(name) for name in SETTINGS], but=["as it is"]))
def test_ragged_rows_keep_and_fit_what_the_oracle_does(name, monkeypatch):
    monkeypatch.setattr(attentionmatching, "_FEW", 4)
    monkeypatch.setattr(attentionmatching, "_BLOCK", 5)
    knobs = {**oracle.KNOBS, **SETTINGS[name]}
    player, params = recording()
    cache = tape.read(player, params, oracle.LENGTHS, small(AttentionMatching, **knobs), STEPS)
    older = [jax.tree.map(np.asarray, layer.cache.older) for layer in cache.layers]
    outputs = np.asarray(tape.decode(params, cache, np.ones((STEPS, ROWS), bool))[1])
    q, k, v = (np.asarray(params[name]) for name in ("q", "k", "v"))
    for row, length in enumerate(oracle.LENGTHS):
        parts = q[:, row], k[:, row], v[:, row], length, player.inv_freq
        for layer, heads in enumerate(oracle.matched(*parts, **knobs)):
            for head, (positions, bias, value) in enumerate(heads):
                held = older[layer].position[row, head] >= 0
                assert older[layer].position[row, head][held].tolist() == positions, f"prompt of {length}"
                got = older[layer].key[row, head, :, 8:10].sum(axis=1)[held] / np.sqrt(8)
                np.testing.assert_allclose(got, bias, atol=2e-3)
                np.testing.assert_allclose(older[layer].value[row, head][held], value, atol=5e-3)
        for layer, trace in enumerate(oracle.run(*parts, **knobs)):
            np.testing.assert_allclose(outputs[:, layer, row], trace.outputs[:STEPS], atol=2e-3)


@pytest.mark.parametrize(("dtype", "cap"), [("float32", None), ("bfloat16", None), ("float32", 0.7)])
def test_a_bias_enters_the_softmax_of_one_query_and_of_many(dtype, cap):
    """It is added to the logit behind a soft cap."""
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.normal(size=(1, 2, *n, 16)), dtype) for n in ((3, 40), (20,), (20,)))
    bias = jnp.asarray(rng.uniform(-3, 3, (1, 2, 20)), jnp.float32)
    at = jnp.where(jnp.arange(20)[None, None] < jnp.array([[[20], [11]]]), jnp.arange(20), -1)
    cache = biased(key, value, bias, at, 4)
    logits = jnp.einsum("bhgtd,bhsd->bhgts", *(x.astype(jnp.float32) for x in (query, key))) / 4
    logits = (logits if cap is None else cap * jnp.tanh(logits / cap)) + bias[:, :, None, None]
    weight = jax.nn.softmax(jnp.where(at[:, :, None, None] >= 0, logits, -jnp.inf), axis=-1)
    want = jnp.einsum("bhgts,bhsd->bhgtd", weight, value.astype(jnp.float32))
    atol = 1e-5 if dtype == "float32" else 2e-2
    position = jnp.arange(20, 60)[None]
    with soft_cap(cap):
        for tokens in (40, 2):
            got, _ = attend_all(query[..., :tokens, :], cache, position[:, :tokens])
            np.testing.assert_allclose(got.astype(jnp.float32), want[..., :tokens, :], atol=atol)
        got, _ = attend_held(query[..., 0, :], cache)
    np.testing.assert_allclose(got.astype(jnp.float32), want[..., 0, :], atol=atol)
