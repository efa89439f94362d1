"""Latent attention: a float64 loop that makes the keys and values of all heads, and the cache that stores keys once.

The laws of methods over it are in `tests/kvjax/test_kinds_of_models.py`.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from experiments.speed.filled_cache import filled_cache
from kvjax.attention.over_cache import attend_held
from models.layers.experts import choose
from models.layers.latent import latents_of, whole_key
from models.sizes.experts import Experts, Router
from models.sizes.latent import Latent, query_scale
from models.sizes.parts import LayerRope
from models.sizes.rope_scaling import YarnScaling
from pallas_kernels.formats.quantised import dequantise, stored_like
from tests.harness import NAMES, any_example
from tests.models.test_parity import ours
from tests.tiny_models import vivid_params

pytestmark = pytest.mark.usefixtures("quick_compile")
LATENT = Latent(rank=10, rotated=6, key_dim=8, value_dim=12, query_rank=14)
CONFIG = models.ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=4, num_kv_heads=1, head_dim=16,
    max_position_embeddings=256, latent=LATENT, query_scale=query_scale(LATENT, None),
    ropes=(LayerRope(theta=100.0, rotated=6),),
)  # fmt: skip
PARAMS = vivid_params(CONFIG)
PROMPTS = [np.random.default_rng(0).integers(0, 64, count).astype(np.int32) for count in (40, 23, 9)]
REFUSING = [name for name in NAMES if "latent" in any_example(name).lacks]


class Apart(models.ModelConfig):
    """The same model, whose keys are stored a second time, as values."""

    value_is_key = False


APART = Apart(**vars(CONFIG))


# ---- the model --------------------------------------------------------------------------------------------------------


def attention(x, params, config):
    """The update [T, d] of one layer from its input x [T, d], in float64, with the keys and values of every head."""
    latent, heads = config.latent, config.num_q_heads
    get = lambda *path: np.asarray(jax.tree.reduce(lambda _, leaf: leaf, _at(params, path)), np.float64)  # noqa: E731

    def normed(rows, scale):
        return rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + 1e-6) * scale

    made, rank = x @ get("latents", "kernel"), latent.query_rank
    query = normed(made[:, :rank], get("query_norm", "scale")) @ get("query", "kernel")
    query = query.reshape(len(x), heads, latent.key_dim + latent.rotated)
    latents = normed(made[:, rank : rank + latent.rank], get("latent_norm", "scale"))
    turning = made[:, rank + latent.rank :]
    up = get("up", "kernel").reshape(latent.rank, heads, latent.key_dim + latent.value_dim)
    angle = np.arange(len(x))[:, None] * 100.0 ** (-np.arange(0, latent.rotated, 2) / latent.rotated)

    def turned(rows):  # neighbouring channels are a complex number
        return (rows[:, 0::2] + 1j * rows[:, 1::2]) * np.exp(1j * angle)

    out = []
    for head in range(heads):
        key, value = np.split(latents @ up[:, head], [latent.key_dim], axis=1)
        logits = query[:, head, : latent.key_dim] @ key.T
        logits = logits + (turned(query[:, head, latent.key_dim :]) @ turned(turning).conj().T).real
        logits = logits / np.sqrt(latent.key_dim + latent.rotated)
        logits[np.triu_indices(len(x), 1)] = -np.inf
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        out.append(weight @ value / weight.sum(axis=1, keepdims=True))
    return np.concatenate(out, axis=1) @ get("out", "kernel")


def _at(tree, path):
    for name in path:
        tree = tree[name]
    return tree


def test_absorbed_attention_is_attention_with_the_keys_and_values_of_every_head():
    """The stream after one layer whose MLP is nothing: what it reads is the normalised embedding, what it adds is this."""
    params = jax.tree.map(lambda x: x, PARAMS)
    params["layers_0"]["mlp"]["down"]["kernel"] = jnp.zeros_like(params["layers_0"]["mlp"]["down"]["kernel"])
    tokens = PROMPTS[1]
    hidden, _ = jax.jit(lambda params: ours(params, CONFIG, tokens[None]))(params)
    embedded = np.asarray(params["embed"]["embedding"], np.float64)[tokens]
    scale = np.asarray(params["layers_0"]["attention_norm"]["scale"], np.float64)
    x = embedded / np.sqrt((embedded**2).mean(axis=-1, keepdims=True) + CONFIG.rms_norm_eps) * scale
    expected = embedded + attention(x, params["layers_0"]["attention"], CONFIG)
    np.testing.assert_allclose(hidden[0][0], expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_key_begins_with_the_pairs_that_rotate(interleaved):
    latent = dataclasses.replace(LATENT, interleaved=interleaved)
    key = whole_key(jnp.arange(10.0), jnp.arange(100.0, 106.0), latent)
    first, second = ([100, 102, 104], [101, 103, 105]) if interleaved else ([100, 101, 102], [103, 104, 105])
    assert key.tolist() == [*first, *range(5), *second, *range(5, 10)]
    assert latents_of(key, latent).tolist() == list(range(10))


def test_yarn_scales_all_channels():
    rule = YarnScaling(factor=40.0, original_max_position_embeddings=4096, mscale=0.707, mscale_all_dim=0.707)
    sizes = Latent(rank=512, rotated=64, key_dim=128, value_dim=128)
    assert query_scale(sizes, rule) == pytest.approx(192**-0.5 * (0.1 * 0.707 * np.log(40) + 1) ** 2)
    assert query_scale(sizes, dataclasses.replace(rule, mscale_all_dim=None)) == 192**-0.5


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_router_is_its_definition(score):
    router = Router(score=score, groups=4, groups_per_tok=2, multiplier=1.5)
    experts = Experts(
        num_experts=12, num_experts_per_tok=4, intermediate_size=4, norm_topk_prob=score == "sigmoid", layers=(0,),
        router=router,
    )  # fmt: skip
    rng = np.random.default_rng(1)
    x, kernel, bias = (rng.normal(size=shape).astype(np.float32) for shape in ((50, 8), (8, 12), (12,)))
    chosen, weight = choose(jnp.asarray(x), jnp.asarray(kernel), None if score == "softmax" else jnp.asarray(bias), experts)
    for row, logits in enumerate(x.astype(np.float64) @ kernel):
        scores = np.exp(logits) / np.exp(logits).sum() if score == "softmax" else 1 / (1 + np.exp(-logits))
        ranked = scores if score == "softmax" else scores + bias
        groups = [sorted(ranked[at : at + 3])[::-1] for at in range(0, 12, 3)]
        best = [group[0] if score == "softmax" else group[0] + group[1] for group in groups]
        taken = sorted(range(4), key=lambda at: -best[at])[:2]
        own = sorted((e for e in range(12) if e // 3 in taken), key=lambda e: -ranked[e])[:4]
        assert set(chosen[row].tolist()) == set(own)
        share = scores[np.asarray(chosen[row])]
        share = share / share.sum() if experts.norm_topk_prob else share
        np.testing.assert_allclose(weight[row], 1.5 * share, rtol=1e-5)


# ---- the cache --------------------------------------------------------------------------------------------------------


def read(config, method, **options):
    return kvjax.prefill(PARAMS, PROMPTS, config=config, method=method, max_new_tokens=8, pad_multiple=1, **options)


def generated(config, method, **options):
    return kvjax.generate(PARAMS, read(config, method, **options), max_new_tokens=6)


MOST = [name for name in NAMES if name not in (*REFUSING, "kvgrad", "ntk")]  # refused for other reasons
MOST += ["stages", "dense_below", "periodic", "twilight", "prefill"]


ONCE = [("h2o", None), *((name, None) for name in MOST if name != "h2o"), ("full", "int8"), ("h2o", "int8")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kv_dtype"), [ONCE[0], *(pytest.param(*x, marks=pytest.mark.thorough) for x in ONCE[1:])])
def test_keys_stored_once_give_what_keys_stored_twice_give(name, kv_dtype):
    knobs = {"scores": ((0.3,),)} if "scores" in type(any_example(name)).__dataclass_fields__ else {}
    method = dataclasses.replace(any_example(name), **knobs)
    once, twice = (generated(config, method, kv_dtype=kv_dtype) for config in (CONFIG, APART))
    np.testing.assert_array_equal(once.tokens, twice.tokens)
    np.testing.assert_array_equal(once.stats.attended, twice.stats.attended)
    assert once.stats.resident_bytes < twice.stats.resident_bytes
    if kv_dtype is not None:
        np.testing.assert_array_equal(2 * once.stats.kv_bytes, twice.stats.kv_bytes)
        return
    np.testing.assert_array_equal(once.cache.logits, twice.cache.logits)
    # A value has 16 numbers of 4 bytes. TokenSelect reads some keys without their values.
    np.testing.assert_array_equal(once.stats.kv_bytes + 64 * once.stats.attended, twice.stats.kv_bytes)


@pytest.mark.parametrize("name", REFUSING)
def test_a_method_that_reads_values_is_refused(name):
    with pytest.raises(ValueError, match="reads the values of each head, which latent attention does not store: take a"):
        kvjax.prefill(PARAMS, PROMPTS, config=CONFIG, method=any_example(name))
    if name == "think":  # inside of another method too
        with pytest.raises(ValueError, match="reads the values of each head"):
            kvjax.prefill(PARAMS, PROMPTS, config=CONFIG, method=any_example("thinned"))


@pytest.mark.parametrize(
    "kv_dtype", [pytest.param("int4", marks=pytest.mark.slow), pytest.param("int8", marks=pytest.mark.thorough)]
)
def test_attention_to_codes_is_attention_to_what_they_stand_for(kv_dtype):
    """Rotation changes the rounding of mixed channels: in 4 bits values apart, which do not rotate, have other codes."""
    out = generated(CONFIG, "full", kv_dtype=kv_dtype)
    held, cache = out.cache.layers[0].cache.held, out.cache.layers[0].cache
    assert held.mixed == (kv_dtype == "int4") and held.shape[-1] == 16
    query = jax.random.normal(jax.random.key(0), (3, 1, 4, 16))
    plain = dataclasses.replace(cache, held=dequantise(held))
    for got, expected in zip(*(jax.jit(attend_held)(query, each) for each in (cache, plain)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    seen = np.asarray(out.stats.length)
    np.testing.assert_array_equal(out.stats.kv_bytes, ({"int8": 16, "int4": 8}[kv_dtype] + 2) * seen)
    np.testing.assert_array_equal(out.stats.full_bytes_read, out.stats.kv_bytes)
    # The prompt's codes are rounded keys of the same prompt.
    exact = read(CONFIG, "full").layers[0].cache
    written = read(CONFIG, "full", kv_dtype=kv_dtype).layers[0].cache.held
    np.testing.assert_array_equal(written.codes, stored_like(exact.held, written).codes)


def test_keys_cannot_be_rounded_otherwise_than_values():
    def needed(config, method, kv_dtype):
        return kvjax.memory_needed(method, config, batch=1, prompt_slots=8, max_new_tokens=8, kv_dtype=kv_dtype)

    for ask in (read, needed):
        with pytest.raises(ValueError, match="kv_dtype='k8v4' rounds values otherwise than keys, but in latent attention"):
            ask(CONFIG, "full", kv_dtype="k8v4")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("quest", None),
        ("quest", "int8"),
        ("quest", "int4"),
        ("pariskv", None),
        ("infllm", "int8"),
        ("infllm", "int4"),
        ("verified", None),
        ("verified", "int4"),
    ],
)
def test_a_row_in_host_memory_is_a_key(name, kv_dtype):
    method = any_example(name)
    if name == "verified":  # takes rows back from the ring
        method = dataclasses.replace(method, draft=any_example("quest"))
    resident, away = (generated(CONFIG, x, kv_dtype=kv_dtype) for x in (method, method.offloaded(True)))
    np.testing.assert_array_equal(away.tokens, resident.tokens)
    np.testing.assert_allclose(away.cache.logits, resident.cache.logits, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(away.stats.kv_bytes, resident.stats.kv_bytes)
    slots = resident.cache.layers[0].cache.num_slots
    assert away.stats.host_bytes == len(PROMPTS) * slots * {None: 64, "int8": 16, "int4": 8}[kv_dtype]


@pytest.mark.thorough
def test_values_in_host_memory_are_keys_a_second_time():
    """TokenSelect scans all keys, which stay on the device; what it attends to crosses the bus."""
    method = any_example("tokenselect")
    resident, away = generated(CONFIG, method), generated(CONFIG, dataclasses.replace(method, offload=True))
    np.testing.assert_array_equal(resident.tokens, away.tokens)
    np.testing.assert_array_equal(resident.stats.kv_bytes + 64 * resident.stats.attended, away.stats.kv_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("full", None), ("full", "int8"), ("full", "int4"), ("quest", "int8"), ("quest", "int4"), ("tokenselect", None)],
)
def test_a_cache_is_filled_for_timing(name, kv_dtype):
    method = any_example(name) if name == "full" else any_example(name).offloaded(True)
    cache = filled_cache(method, CONFIG, length=70, batch=2, max_new_tokens=8, kv_dtype=kv_dtype)
    out = kvjax.generate(PARAMS, cache, max_new_tokens=4)
    np.testing.assert_array_equal(out.stats.full_bytes_read, 74 * {None: 64, "int8": 18, "int4": 10}[kv_dtype])


def test_a_cache_is_forked_and_saved(tmp_path):
    method = any_example("h2o")  # whose programs another test compiles
    cache, out = read(CONFIG, method), generated(CONFIG, method)
    kvjax.save_cache(tmp_path / "cache", cache)
    fork = kvjax.fork(cache, 2)
    assert fork.layers[0].cache.key is fork.layers[0].cache.value
    for one, other in zip(*map(jax.tree.leaves, (cache.layers, fork.layers)), strict=True):
        np.testing.assert_array_equal(np.repeat(one, 2, axis=0), other)
    loaded = kvjax.load_cache(tmp_path / "cache", config=CONFIG, method=method)
    np.testing.assert_array_equal(kvjax.generate(PARAMS, loaded, max_new_tokens=6).tokens, out.tokens)


def test_one_head_cannot_be_divided_over_devices():
    with pytest.raises(ValueError, match=re.escape("a model of num_kv_heads=1, intermediate_size=48, vocab_size=64 can be")):
        CONFIG.local(2)
