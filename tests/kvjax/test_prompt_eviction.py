"""Methods that score the prompt's tokens once, `tests.harness.ONCE`: by default each meets its oracle here, and kvpress."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from kvjax import registry
from kvjax.cache import PlainCache
from kvjax.decoding.prefill import run_prefill
from kvjax.methods import AdaKV, ExpectedAttention, PyramidKV, Quest, ThinK
from kvjax.protocol.method import Inputs, LayerSpec, Prompt
from kvjax.protocol.observation import prefix_votes
from kvjax.protocol.slots import Reads
from kvjax.protocol.typing import EMPTY, pytree
from kvjax.testing.layer import stored
from kvjax.testing.model import TinyModel
from kvjax.testing.subject import tokens_of_layer
from kvjax.wrappers import Stages
from tests import goldens
from tests.harness import ONCE, frequencies, oracle, random_tokens, repeated, small
from tests.models.test_parity import write_checkpoint
from tests.oracles.pyramidkv import budget_of

pytestmark = pytest.mark.usefixtures("quick_compile")
KVPRESS = {  # methods at the settings of the goldens
    "snapkv": {"obs_window": 8, "kernel": 5},
    "tova": {},
    "knorm": {},
    "observedattention": {},
    "expectedattention": {"num_future": 20},
    "adakv": {"obs_window": 8, "kernel": 5, "safeguard": 0.5},
    "tovaonce": {},
    "keydiff": {"block": 64},
    "pyramidkv": {"obs_window": 8, "kernel": 5, "beta": 4},
    "duoattention": {"scores": ((0.3, 0.9), (0.1, 0.2)), "sparsity": 0.5, "num_sink": 6, "num_recent": 10},
}
EVICT_AGAIN = {"tova", "keydiff"}  # they go on to evict, kvpress does not
GOLDENS = {"tovaonce": "tova"}  # the name in kvpress of a method that has another one here


def test_what_is_kept_is_what_the_oracles_keep():
    """One program for all; test_oracles.py runs each by itself, and decodes. Two have a budget of the window alone."""
    tight = [(name, {**oracle(name).KNOBS, "budget": 5}) for name in ("snapkv", "adakv")]
    again = ("rkv", "triattention")  # see test_periodic.py
    cases = [(name, oracle(name).KNOBS) for name in ONCE if name not in again] + tight
    lengths, inv_freq = np.array([1, 6, 13, 40]), frequencies(8)
    q, k, v = random_tokens(3, len(lengths), 2, 2, 41, 8)
    spec = LayerSpec(batch=4, num_kv_heads=2, group_size=2, head_dim=8, dtype="float32", prompt_slots=40, max_new_tokens=1)

    @jax.jit
    def positions(methods, q, k, v):
        at = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32)[None], (4, 40))
        position = jnp.where(at < lengths[:, None], at, EMPTY)
        given = Inputs(query=q, key=k, value=v, position=position, tokens=at, inv_freq=inv_freq, shared=None, start=0)
        read = [(method, method.attend(method.init(spec), given)[1]) for method in methods]
        return [method.finish(state, spec).cache.position for method, state in read]

    methods = [small(registry.builtin()[name], **knobs).for_layer(0, 2) for name, knobs in cases]
    found = positions(methods, *(x[..., :40, :] for x in (q, k, v)))
    for (name, knobs), position in zip(cases, found, strict=True):
        for row, length in enumerate(lengths.tolist()):
            parts = q[row, :, :, : length + 1], k[row, :, : length + 1], v[row, :, : length + 1]
            want = oracle(name).run(*parts, length, inv_freq, **knobs).kept[0]
            got = [set(x[x >= 0].tolist()) for x in np.asarray(position[row])]
            assert got == [x - {length} for x in want], f"{name} {knobs}, prompt of {length}"
            assert length < 40 or min(map(len, got)) < 40


@functools.cache
def golden():
    return json.loads((goldens.FOLDER / "kvjax" / "kvpress.json").read_text())


@functools.cache
def model(directory):
    with np.load(goldens.FOLDER / "models" / "llama.npz") as weights:
        write_checkpoint(directory, dict(weights))
    return models.from_pretrained(directory)


def compressed(method, directory):
    params, config = model(directory)
    tokens = np.array(golden()["tokens"][: golden()["prompt"]])[None]
    return kvjax.prefill(params, tokens, config=config, method=method, max_new_tokens=4, pad_multiple=1)


@pytest.mark.parametrize("name", repeated([pytest.param(name) for name in KVPRESS], but=["expectedattention"]))
def test_kvpress_keeps_the_same_tokens_and_has_the_same_logits(name, tmp_path_factory):
    params, _ = model(tmp_path_factory.getbasetemp())
    budget = {} if name == "duoattention" else {"budget": 24}
    cache = compressed(small(registry.builtin()[name], **budget, **KVPRESS[name]), tmp_path_factory.getbasetemp())
    want = golden()["methods"][GOLDENS.get(name, name)]
    for layer, heads in enumerate(want["kept"]):
        for head, kept in enumerate(heads):
            position = np.asarray(stored(cache.layers[layer]).position[0, head])
            assert sorted(position[position >= 0].tolist()) == kept, f"layer {layer}, head {head}"
    steps = list(zip(golden()["tokens"][golden()["prompt"] :], want["logits"], strict=True))
    for token, logits in steps[: 1 if name in EVICT_AGAIN else None]:
        cache = kvjax.decode_step(params, cache, np.array([token]))
        np.testing.assert_allclose(cache.logits[0], logits, atol=2e-4, rtol=0)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["think", "snapkv and think"])
def test_kvpress_drops_the_same_channels(name, tmp_path_factory):
    """And has the same logits, since it drops them of the newest tokens too."""
    params, _ = model(tmp_path_factory.getbasetemp())
    method = small(ThinK, channels=0.6, obs_window=8, num_recent=0)
    if name != "think":
        method = Stages(evict=kvjax.make("snapkv", budget=24, **KVPRESS["snapkv"]), retrieve=method)
    cache = compressed(method, tmp_path_factory.getbasetemp())
    want = golden()["thin"][name]
    np.testing.assert_array_equal([x.cache.older.channels[0] for x in cache.layers], want["channels"])
    for token, logits in zip(golden()["tokens"][golden()["prompt"] :], want["logits"], strict=True):
        cache = kvjax.decode_step(params, cache, np.array([token]))
        np.testing.assert_allclose(cache.logits[0], logits, atol=2e-4, rtol=0)


# ---- PyramidKV ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget, window, beta, layers", [(2048, 32, 20, 32), (128, 8, 20, 7), (33, 32, 20, 4), (9, 4, 1, 3)])
def test_budgets_of_layers_have_the_mean_that_is_asked_for(budget, window, beta, layers):
    method = PyramidKV(budget=budget, obs_window=window, beta=beta)
    sizes = [method.for_layer(layer, layers).budget for layer in range(layers)]
    assert sizes == [budget_of(layer, layers, budget, window, beta) for layer in range(layers)]
    assert sizes == sorted(sizes, reverse=True) and budget - 1 < np.mean(sizes) <= budget
    arrays = [method.for_layer(layer, layers).capacity for layer in range(layers)]
    assert len(set(arrays)) <= 8 and all(array >= size for array, size in zip(arrays, sizes, strict=True))
    assert arrays == sizes if layers <= 8 else np.mean(arrays) < 1.1 * budget
    if beta == 1:
        assert set(sizes) == {budget}
    assert method.for_layer(0, 1).budget == budget


def test_a_traced_budget_equals_a_static_budget_and_stays_in_int32():
    """Under one capacity, at the largest settings."""
    budgets = np.array([100, 101, 9999, 131_071, 1_000_000])
    method = PyramidKV(capacity=1_000_000, budget=1_000_000, beta=100, obs_window=100)

    def sizes(budget):
        made = dataclasses.replace(method, budget=budget)
        return jnp.stack([made.for_layer(layer, 126).budget for layer in (0, 1, 77, 125)])

    got = np.asarray(jax.vmap(sizes)(jnp.asarray(budgets, jnp.int32)))
    want = [[budget_of(layer, 126, int(budget), 100, 100) for layer in (0, 1, 77, 125)] for budget in budgets]
    np.testing.assert_array_equal(got, want)


# ---- storage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, slots",
    [
        pytest.param(AdaKV(budget=16, obs_window=4), (32, 32, 32), marks=pytest.mark.thorough),
        (AdaKV(budget=16, obs_window=4, head_factor=1.25), (20, 20, 20)),
        (PyramidKV(budget=16, obs_window=4, beta=4), (25, 16, 7)),
        pytest.param(ExpectedAttention(budget=16), (16, 16, 16), marks=pytest.mark.thorough),
    ],
    ids=lambda x: type(x).__name__,
)
def test_storage_is_bounded_by_the_budget(method, slots):
    """Whatever the prompt was; 5 tokens may follow. What was recorded of the prompt's queries is gone."""
    tiny = TinyModel(num_layers=3)
    params = jax.eval_shape(lambda: tiny.random_params(0))
    tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1024), (1,)))
    read = functools.partial(run_prefill, method=method, model=tiny, max_new_tokens=5, chunk_size=256)
    cache = jax.eval_shape(read, params, tokens, length)
    assert tuple(stored(x).num_slots - 5 for x in cache.layers) == slots
    rows = sum(math.prod(x.shape) for x in jax.tree.leaves(cache.layers))
    per_slot = tiny.num_kv_heads * (2 * tiny.head_dim + 1)
    assert rows == sum(slots) * per_slot + 3 * (5 * per_slot + 1)


# ---- beside other methods -----------------------------------------------------------------------------------------


def test_stages_collect_moments_from_one_position_on():
    @pytree
    class Other(Quest):
        reads = Reads(moments_from=3)

    with pytest.raises(ValueError, match=r"must have one moments_from"):
        Stages(evict=ExpectedAttention(), retrieve=Other())


@pytest.mark.thorough
def test_a_window_is_the_methods_own_whatever_a_wrapper_records():
    """Another stage may want more of the last queries than vote here."""
    q, k, _ = (jnp.asarray(x[..., :40, :]) for x in tokens_of_layer())
    at = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32)[None, None], k.shape[:3])
    cache = PlainCache(key=k, value=k, position=at, cursor=jnp.full((len(k),), 40, jnp.int32))
    nothing = {"mass": jnp.zeros((len(k), 2, 0)), "tokens": jnp.zeros((len(k), 0), jnp.int32)}
    narrow, wide = (Prompt(query=q[..., -w:, :], query_position=at[:, 0, -w:], **nothing) for w in (3, 7))
    np.testing.assert_array_equal(*(prefix_votes(cache, prompt, 3, 5, "avg") for prompt in (narrow, wide)))
