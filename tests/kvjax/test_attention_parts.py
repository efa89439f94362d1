"""Parts that attention itself needs: a soft cap and sink logits. test_kinds_of_models.py has the laws of models with them."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.sinks import with_sinks
from kvjax.methods import Full, MosaicKV
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.dispatch import run_shared
from pallas_kernels.soft_cap import capped, get_soft_cap, soft_cap
from tests import tiny_models
from tests.harness import prompts
from tests.kvjax.test_kinds_of_models import CAPS, KINDS, defined, params

pytestmark = pytest.mark.usefixtures("quick_compile")

MOST = [pytest.param(x, marks=[pytest.mark.thorough] * (x != "window, capped")) for x in CAPS]  # both parts, and a window


def without_parts(part, tokens):
    """The logits after the last token of the same model without cap and sinks: a sink of minus infinity is none."""
    layers = dict(params(part))
    for name, layer in layers.items():
        if "sinks" in layer.get("attention", {}):
            sinks = {"bias": jnp.full_like(layer["attention"]["sinks"]["bias"], -1e9)}
            layers[name] = {**layer, "attention": {**layer["attention"], "sinks": sinks}}
    plain = dataclasses.replace(KINDS[part], attention_softcap=None)
    return np.asarray(tiny_models.run(plain, layers, jnp.asarray([tokens], jnp.int32)))[0, -1]


@pytest.mark.slow
@pytest.mark.parametrize("part", MOST)
@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_codes_of_keys_and_values_are_near_the_definition(part, kv_dtype):
    """A cache of codes has the parts of attention, too: its logits are much nearer to a model with them than without."""
    rows = [list(row) for row in prompts()]
    given = {"config": KINDS[part], "method": "full", "max_new_tokens": 3, "kv_dtype": kv_dtype}
    out = kvjax.generate(params(part), kvjax.prefill(params(part), rows, **given), max_new_tokens=3, eos_token_ids=())
    row = rows[0] + np.asarray(out.tokens[0]).tolist()
    want, plain = defined(part, [row])[0], without_parts(part, row)
    near, far = (np.abs(out.cache.logits[0] - logits).max() for logits in (want, plain))
    assert np.abs(want - plain).max() > 1e-2, "the parts change the logits"
    assert near < far / {"int8": 10, "int4": 2}[kv_dtype]


def test_a_method_without_sinks_is_refused():
    config = KINDS["sinks"]
    with pytest.raises(ValueError, match="MosaicKV has an attention of its own without sink logits, which ModelConfig has"):
        kvjax.prefill(params("sinks"), np.zeros((1, 4), np.int32), config=config, method=MosaicKV(), max_new_tokens=2)
    assert "sinks" not in Full.lacks and "sinks" in MosaicKV.lacks


def test_sinks_are_one_more_logit():
    rng = np.random.default_rng(0)
    logits, value, sinks = rng.normal(size=(2, 3, 2, 5)), rng.normal(size=(5, 4)), rng.normal(0, 2, (3, 2))
    weight = np.exp(logits)
    total = weight.sum(axis=-1)
    out, lse = with_sinks(
        jnp.asarray(weight @ value / total[..., None], jnp.float32), jnp.asarray(np.log(total), jnp.float32),
        jnp.asarray(sinks, jnp.float32),
    )  # fmt: skip
    whole = total + np.exp(sinks)[None]
    np.testing.assert_allclose(out, weight @ value / whole[..., None], atol=1e-6)
    np.testing.assert_allclose(lse, np.log(whole), atol=1e-6)
    nothing = with_sinks(jnp.zeros((1, 3, 2, 4)), jnp.full((1, 3, 2), -jnp.inf), jnp.asarray(sinks, jnp.float32))
    assert not np.isnan(nothing[0]).any() and not nothing[0].any()
    np.testing.assert_allclose(nothing[1][0], sinks, atol=1e-6)


def test_a_cap_is_a_setting_of_its_context_and_of_traces():
    logits = jnp.asarray([-9.0, 0.5, 3.0])
    assert get_soft_cap() is None and capped(logits) is logits
    with soft_cap(2.0):
        np.testing.assert_allclose(capped(logits), 2 * np.tanh(np.asarray(logits) / 2), rtol=1e-6)
        with soft_cap(None):
            assert capped(logits) is logits
    with pytest.raises(ValueError, match="soft_cap: got 0, expected a positive number or None"), soft_cap(0):
        pass
    made = []
    for cap in (None, 0.5, None):
        with soft_cap(cap):
            made.append(kvjax_shared(logits))
    np.testing.assert_array_equal(made[0], made[2])
    assert np.abs(made[0] - made[1]).max() > 1


@functools.partial(jnp.vectorize, signature="(n)->(n)")
def kvjax_shared(logits):
    """A trace that is kept, and that reads the setting."""
    return run_shared(capped, logits)


def test_kernels_do_not_run_under_a_cap():
    q, k = jnp.ones((1, 1, 1, 16)), jnp.ones((1, 1, 8, 16))
    slots, mask = jnp.zeros((1, 1, 4), jnp.int32), jnp.ones((1, 1, 4), bool)
    with soft_cap(3.0), pytest.raises(NotImplementedError, match="needs logits without a soft cap, got a cap of 3.0"):
        gather_attention(q, k, k, slots, mask, scale=1.0, implementation="pallas_triton", platform="gpu")
