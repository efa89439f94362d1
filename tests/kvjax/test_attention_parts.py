"""Parts that attention itself needs, a soft cap and sink logits: kvjax's methods on models that have them.

The definition is one softmax per query (`tests.tiny_models.dense_attend`); golden outputs of transformers are in
`tests/models/test_families.py`.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention.sinks import with_sinks
from kvjax.exact import FromJudge
from kvjax.methods import Full, MosaicKV
from kvjax.testing import laws
from kvjax.testing.subject import QUESTIONS, STEPS, Subject
from models import LinearLayers
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.dispatch import run_shared
from pallas_kernels.soft_cap import capped, get_soft_cap, soft_cap
from tests import tiny_models
from tests.harness import any_example, generous, group, prompts, small

pytestmark = pytest.mark.usefixtures("quick_compile")

PLAIN = tiny_models.FAMILIES["qwen2"]
LINEAR = LinearLayers(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_width=4, layers=(0,))
CONFIGS = {
    "sinks": dataclasses.replace(PLAIN, attention_sinks=True, out_bias=True, num_layers=1),
    "cap": dataclasses.replace(PLAIN, attention_softcap=0.7, num_layers=1),
    "windows": dataclasses.replace(PLAIN, attention_sinks=True, attention_softcap=0.7, windows=(7, None)),
    "linear": dataclasses.replace(PLAIN, attention_sinks=True, attention_softcap=0.7, linear=LINEAR),
}
NAMES = ("full", "snapkv", "quest", "pariskv", "tokenselect", "chess", "verified")
OTHERS = ("streamingllm", "infllm", "selfextend", "shadowkv", "h2o", "retroinfer", "kvzip", "stages", "thinned", "twilight",
          "prefill", "per_layer", "periodic", "magicpig")  # fmt: skip
DEFAULT = {("sinks", "quest"), ("cap", "snapkv")}  # a choice: other pairs run under --thorough
MOST = [pytest.param(x, marks=[pytest.mark.thorough] * (x != "windows")) for x in CONFIGS]  # both parts, and a window
PAIRS = [
    pytest.param(part, name, marks=[pytest.mark.thorough] * ((part, name) not in DEFAULT) + [pytest.mark.xdist_group(name)])
    for part in CONFIGS
    for name in NAMES
]


def everything(name):
    """As `generous`, for these models' heads, which are twice as wide."""
    return dataclasses.replace(generous(name), rank=32) if name == "shadowkv" else generous(name)


@functools.cache
def params(part):
    """Parameters whose sinks take a share that matters beside tens of tokens."""
    made = tiny_models.vivid_params(CONFIGS[part], seed=5)
    return jax.tree.map_with_path(lambda path, x: x + 4 if jax.tree_util.DictKey("sinks") in path else x, made)


@functools.cache
def subject(part, name):
    return Subject(
        any_example(name), CONFIGS[part], params(part), full=None if name == "full" else subject(part, "full"),
        everything=everything(name), prompts=prompts(), few_programs=True,
    )  # fmt: skip


def defined(part, tokens):
    """The logits after the last token, by the definition."""
    return np.asarray(tiny_models.run(CONFIGS[part], params(part), jnp.asarray([tokens], jnp.int32)))[0, -1]


def without_parts(part, tokens):
    """The logits after the last token of the same model without cap and sinks: a sink of minus infinity is none."""
    layers = dict(params(part))
    for name, layer in layers.items():
        if "sinks" in layer.get("attention", {}):
            sinks = {"bias": jnp.full_like(layer["attention"]["sinks"]["bias"], -1e9)}
            layers[name] = {**layer, "attention": {**layer["attention"], "sinks": sinks}}
    plain = dataclasses.replace(CONFIGS[part], attention_softcap=None)
    return np.asarray(tiny_models.run(plain, layers, jnp.asarray([tokens], jnp.int32)))[0, -1]


@pytest.mark.parametrize("part", MOST)
def test_full_is_the_definition(part):
    """After prompts in one pass, after several tokens at once, and after steps; the part changes the logits."""
    cache = subject(part, "full").read()
    rows = [list(row) for row in prompts()]
    for at, row in enumerate(rows):
        np.testing.assert_allclose(cache.logits[at], defined(part, row), atol=2e-4, rtol=0)
    cache = kvjax.extend(params(part), cache, [list(x) for x in QUESTIONS])
    rows = [row + list(more) for row, more in zip(rows, QUESTIONS, strict=True)]
    np.testing.assert_allclose(cache.logits[0], defined(part, rows[0]), atol=2e-4, rtol=0)
    out = kvjax.generate(params(part), cache, max_new_tokens=3, eos_token_ids=())
    rows = [row + np.asarray(new).tolist() for row, new in zip(rows, out.tokens, strict=True)]
    np.testing.assert_allclose(out.cache.logits[0], defined(part, rows[0]), atol=2e-4, rtol=0)
    assert np.abs(without_parts(part, rows[0]) - defined(part, rows[0])).max() > 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("part", CONFIGS)
def test_a_prompt_in_chunks_is_the_definition(part):
    cache = subject(part, "full").read(chunk_size=16)
    for at, row in enumerate(prompts()):
        np.testing.assert_allclose(cache.logits[at], defined(part, list(row)), atol=2e-4, rtol=0)


@pytest.mark.parametrize(("part", "name"), PAIRS)
def test_a_method_that_keeps_everything_is_full(part, name):
    if generous(name) is not None:
        laws.everything_kept_equals_full(subject(part, name))


@pytest.mark.thorough
@pytest.mark.parametrize(("part", "name"), PAIRS)
def test_other_laws_hold(part, name):
    laws.ragged_rows_equal_alone(subject(part, name))
    if name not in ("full", "verified"):
        laws.setting_does_something(subject(part, name))
    laws.generating_in_two_calls_equals_one(subject(part, name))
    laws.decoding_keeps_structure_shapes_and_dtypes(subject(part, name))
    laws.ragged_questions_equal_alone(subject(part, name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [group(name) for name in OTHERS])
@pytest.mark.parametrize("part", ["sinks", "cap"])
def test_other_methods_that_keep_everything_are_full(part, name):
    if generous(name) is not None:
        laws.everything_kept_equals_full(subject(part, name))
    laws.ragged_rows_equal_alone(subject(part, name))


@pytest.mark.thorough
@pytest.mark.parametrize("part", CONFIGS)
def test_verified_tokens_are_those_of_full(part):
    """The draft leaves tokens out, and every pass corrects it."""
    np.testing.assert_array_equal(subject(part, "verified").base[1].tokens, subject(part, "full").base[1].tokens)


@pytest.mark.thorough
@pytest.mark.parametrize("part", CONFIGS)
def test_a_draft_that_asks_for_the_mass_of_a_pass_gets_the_tokens_of_full(part):
    """The mass that a kernel makes beside the attention has no sinks, so another one is asked for."""
    method = kvjax.Verified(draft=small(FromJudge, budget=20, num_recent=13, obs_window=4), depth=3)
    cache = subject(part, "full").read(method)
    got = kvjax.generate(params(part), cache, max_new_tokens=STEPS, eos_token_ids=())
    np.testing.assert_array_equal(got.tokens, subject(part, "full").base[1].tokens)


@pytest.mark.parametrize("part", MOST)
@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("int4", marks=pytest.mark.thorough)])
def test_codes_of_keys_and_values_are_near_the_definition(part, kv_dtype):
    """A cache of codes has the parts of attention, too: its logits are much nearer to a model with them than without."""
    rows = [list(row) for row in prompts()]
    given = {"config": CONFIGS[part], "method": "full", "max_new_tokens": 3, "kv_dtype": kv_dtype}
    out = kvjax.generate(params(part), kvjax.prefill(params(part), rows, **given), max_new_tokens=3, eos_token_ids=())
    row = rows[0] + np.asarray(out.tokens[0]).tolist()
    near, far = (np.abs(out.cache.logits[0] - each(part, row)).max() for each in (defined, without_parts))
    assert near < far / {"int8": 10, "int4": 2}[kv_dtype]


def test_a_method_without_sinks_is_refused():
    config = CONFIGS["sinks"]
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
