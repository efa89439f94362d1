"""Caches of codes: a method does on them exactly what it does in a model whose keys and values have the rounded numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.cache import LayerSpec
from kvjax.cache.offload import Near, empty_storage, offload
from kvjax.cache.quantised import KV_DTYPES, QuantisedCache, empty_resident, has_groups, row_bytes
from kvjax.decoding.layers import layer_methods
from kvjax.testing.subject import STEPS
from kvjax.wrappers import Prefill, Stages
from pallas_kernels.formats.quantised import dequantise, quantise
from pallas_kernels.host import copied_slots
from pallas_kernels.machine import assume_machine
from tests import harness
from tests.kvjax.cases import ask, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")
LENGTHS = np.array([40, 23, 9], np.int32)
OWN = (
    "attentionmatching",
    "mosaickv",
    "shadowkv",
    "think",
)  # with a storage of their own; written out, because a test asks all methods
LAYERS = [
    *harness.ONE_LAYER,
    *(harness.group(name) for name, x in harness.WRAPPERS.items() if "codes" not in x.lacks and not x.drafts),
]
SIZES = {"batch": 2, "prompt_slots": 4096, "max_new_tokens": 64}


def but_own(params, slow):
    """Parameters without the methods in `OWN`: the name ``slow`` runs with the slow tests, all other names thoroughly."""
    marks = {True: pytest.mark.slow, False: pytest.mark.thorough}
    return [pytest.param(*x.values, marks=[*x.marks, marks[x.values[0] == slow]]) for x in params if x.values[0] not in OWN]


@functools.cache
def rows():
    return harness.random_tokens(3, 3, 2, 2, 56, 16)


def rounded(x, kv_dtype, which):
    """The keys (``which`` 0) or values (1) that a cache reads back."""
    kinds, mixed = KV_DTYPES[kv_dtype]
    return np.asarray(dequantise(quantise(jnp.asarray(x), kinds[which], mixed, has_groups(kinds, which))))


@pytest.mark.parametrize(
    "kind, chunk",
    [
        ("int8", None),
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in (("float8_e4m3fn", 7), ("k8v4", 7), ("int4", None))),
    ],
)
@pytest.mark.parametrize("name", but_own(LAYERS, slow="h2o"))
def test_rounds_keys_and_values_and_changes_nothing_else(name, kind, chunk):
    """Without rotation, so that the other run gets the rounded keys. Empty slots hold NaN."""
    q, k, v = rows()
    options = {"prompt": 48, "inv_freq": np.zeros(8, np.float32), "chunk": chunk}
    method = harness.any_example(name)
    got = harness.drive(method, q, k, v, LENGTHS, kv_dtype=kind, poison=True, **options)
    want = harness.drive(method, q, rounded(k, kind, 0), rounded(v, kind, 1), LENGTHS, **options)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got.prompt[row, :, :, :length], want.prompt[row, :, :, :length], atol=1e-6)
    np.testing.assert_allclose(got.outputs, want.outputs, atol=1e-6)
    np.testing.assert_array_equal(got.attended, want.attended)
    np.testing.assert_array_equal(got.kept, want.kept)
    assert isinstance(harness.stored(got.state), QuantisedCache) and not np.array_equal(k, rounded(k, kind, 0))


@pytest.mark.parametrize(
    "kind, key_bytes, value_bytes",
    [
        ("int8", 16, 16),
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in (("float8_e4m3fn", 16, 16), ("k8v4", 16, 8), ("int4", 8, 8))),
    ],
)
@pytest.mark.parametrize("values_only", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_host_memory_has_the_codes_of_a_resident_cache(kind, key_bytes, value_bytes, values_only):
    """Chunks of a prompt, single tokens, a sync, ragged tokens; scales and codes bit by bit, wherever they are."""
    spec = LayerSpec(
        batch=3, num_kv_heads=2, group_size=2, head_dim=16, dtype="float32", prompt_slots=40, max_new_tokens=0,
        kv_dtype=kind, offloaded=True,
    )  # fmt: skip
    _, k, v = (jnp.asarray(x) for x in rows())
    order = jnp.arange(56, dtype=jnp.int32)[None]
    position = jnp.where(order < jnp.asarray([[30], [17], [5]]), order, -1)

    def run(cache, near):
        for start in (0, 16):
            at = slice(start, start + 16)
            cache = cache.append(k[:, :, at], v[:, :, at], position[:, at], start)
        before = cache.resident()
        if cache.rows is not None:
            cache = offload(cache.resident(), near, host=cache.rows.host, values_only=values_only)
        for at in range(32, 36):  # of rows that have other lengths: a resident cache is told the same
            cache = cache.append(k[:, :, at : at + 1], v[:, :, at : at + 1], cache.cursor[:, None])
        if cache.rows is not None:
            cache = cache.sync(4)
        real = order[:, :3] < jnp.asarray([[3], [1], [0]])
        more = jnp.where(real, cache.cursor[:, None] + order[:, :3], -1)
        cache = cache.append(k[:, :, 36:39], v[:, :, 36:39], more)
        slots = cache.cursor[:, None] - 3 + order[:, :3]
        far = jnp.minimum(cache.cursor[:, None] - 1, 3) + order[:, :2]  # neither first slots nor, in the first row, new ones
        return before, cache.resident(), cache.keys_at(slots), cache.keys_between(slots), cache.keys_between(far), cache

    near = Near(first=2, newest=6)
    *got, cache = jax.jit(run, static_argnums=1)(empty_storage(spec, 40, values_only), near)
    *want, _ = jax.jit(run, static_argnums=1)(empty_resident(spec, 40), near)
    stored = [np.asarray(x.valid) for x in want[:2]]
    for x, y, held in zip(got[:2], want[:2], stored):
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            a, b = (np.asarray(z, np.float32) for z in (a, b))
            np.testing.assert_array_equal(*((a[held], b[held]) if a.shape[:3] == held.shape else (a, b)))
    for a, b in zip(got[2:], want[2:]):
        np.testing.assert_array_equal(a, b)
    hosted = value_bytes if values_only else key_bytes + value_bytes
    assert cache.host.dtype == (kind if kind == "float8_e4m3fn" else "int8") and cache.rows.host.shape[3] == hosted
    scales = 2 + (8 if value_bytes == 8 else 2)  # of a key one, of a value in 4 bits four
    assert (cache.slot_bytes, cache.slot_bus_bytes) == (key_bytes + value_bytes + scales, hosted)
    row = copied_slots(cache.cursor, cache.sinks, 8)[:, None, :, None]  # copies read back under the scales of their slots
    value = np.take_along_axis(np.asarray(got[1].value), np.minimum(row, 39), axis=2)
    copied = np.asarray(row < cache.cursor[:, None, None, None])
    np.testing.assert_array_equal(np.where(copied, cache.value, 0), np.where(copied, value, 0))


@pytest.mark.parametrize("name", but_own(harness.METHODS, slow="quest"))
def test_a_model_goes_on_from_it(name, tmp_path):
    """Generation in two calls, questions, forks and saved caches of ragged rows; and what the accounting says."""
    cache = harness.read(harness.any_example(name), kv_dtype="int8")
    assert cache.kv_dtype == "int8" and ", in int8)" in repr(cache)
    kvjax.save_cache(tmp_path / "cache", cache)
    params = harness.tiny_params()
    half = kvjax.generate(params, kvjax.fork(cache), max_new_tokens=STEPS // 2, eos_token_ids=())
    rest = kvjax.generate(params, half.cache, max_new_tokens=STEPS - STEPS // 2, eos_token_ids=())
    loaded = kvjax.load_cache(tmp_path / "cache", config=harness.TINY, method=harness.any_example(name))
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    asked = ask(kvjax.fork(cache))
    once = go_on(cache)
    np.testing.assert_array_equal(np.concatenate([half.tokens, rest.tokens], axis=1), once.tokens)
    np.testing.assert_array_equal(go_on(loaded).tokens, once.tokens)
    assert np.isfinite(asked.logits).all()
    plain = go_on(harness.read(harness.any_example(name)))
    assert np.abs(once.cache.logits - plain.cache.logits).max() > 0
    np.testing.assert_array_equal(once.stats.length, plain.stats.length)
    assert np.all(once.stats.full_bytes_read < plain.stats.full_bytes_read)
    assert once.stats.resident_bytes < plain.stats.resident_bytes
    np.testing.assert_array_equal(once.stats.is_no_op, plain.stats.is_no_op)


def test_a_slot_takes_its_codes_and_their_scales():
    """A slot of D numbers takes D bytes and a scale of 2, for the key and for the value."""
    config = dataclasses.replace(harness.TINY, head_dim=128, dtype="bfloat16")
    full, small = (kvjax.memory_needed("full", config, **SIZES, kv_dtype=kind).device for kind in (None, "int8"))
    slots = 2 * 4160 * config.num_kv_heads * config.num_layers
    assert full - small == slots * 2 * (256 - 130)
    pieces = kvjax.memory_needed("full", config, **SIZES, chunk_size=1024, kv_dtype="float8_e4m3fn")
    # Of one row: the prompt as it reads back, and what a pass takes out of a layer, with positions and a cursor.
    row = config.num_kv_heads * (2 * 4096 * 256 + 4160 * (2 * 130 + 4)) + 4
    assert pieces.device == small and pieces.staged >= row
    cache = jax.eval_shape(lambda: kvjax.decoding.layers.blank_cache(kvjax.make("full"), config, kv_dtype="int8"))
    assert {state.cache.slot_bytes for state in cache.layers} == {260} == {row_bytes(128, "bfloat16", "int8")}
    assert [row_bytes(128, "bfloat16", kind) for kind in (None, "k8v4", "int4")] == [512, 202, 138]
    assert [row_bytes(dim, "bfloat16", "k8v4") for dim in (64, 6)] == [64 + 32 + 2 + 8, 6 + 3 + 4]  # 6: one scale each
    paris = kvjax.make("pariskv", offload=True)
    sizes = {**SIZES, "chunk_size": 1024, "order": "chunks"}
    wide, codes = (kvjax.memory_needed(paris, config, **sizes, kv_dtype=kind) for kind in (None, "int8"))
    assert wide.host == slots * 512 == 2 * codes.host and wide.staged >= wide.host // config.num_layers
    assert codes.staged >= codes.host // config.num_layers + 2 * 2 * 4096 * config.num_kv_heads * 256
    near = sum(paris.near(4160, 64))
    copies = 2 * config.num_kv_heads * config.num_layers * near * 256
    assert codes.device - wide.device == slots * 4 - copies  # scales of all slots, and half as many bytes of copies


@pytest.mark.parametrize("kind", KV_DTYPES)
@pytest.mark.parametrize("dim", [6, 8])
def test_the_memory_that_is_said_is_the_size_of_the_arrays(dim, kind):
    """A value in 4 bits of 6 channels has one scale, of 8 channels four."""
    spec = LayerSpec(
        batch=3, num_kv_heads=harness.TINY.num_kv_heads, group_size=2, head_dim=dim, dtype=harness.TINY.dtype,
        prompt_slots=40, max_new_tokens=8, kv_dtype=kind,
    )  # fmt: skip
    cache = jax.eval_shape(functools.partial(empty_resident, spec, 48))
    config = dataclasses.replace(harness.TINY, head_dim=dim)
    needed = kvjax.memory_needed("full", config, batch=3, prompt_slots=40, max_new_tokens=8, kv_dtype=kind)
    assert needed.device == config.num_layers * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


@pytest.mark.parametrize("name", harness.NAMES)
def test_a_class_and_its_layers_agree_on_quantising(name):
    """What the class says is what its layers say; the message about another method's refusal asks the classes."""
    layers = layer_methods(harness.example(name), harness.TINY)
    assert {"codes" in layer.lacks for layer in (*layers, harness.example(name))} == {name in OWN}


def test_unknown_dtypes_and_own_storages_are_refused():
    with pytest.raises(ValueError, match="kv_dtype must be 'int8', .*'k8v4' or 'int4', or None .*, got 'int3'"):
        kvjax.prefill({}, [[1, 2]], config=harness.TINY, kv_dtype="int3")
    for name in OWN:
        called = registry.builtin()[name].__name__
        with pytest.raises(ValueError, match=f"{called} has a storage of its own and cannot run with kv_dtype='int8'"):
            kvjax.memory_needed(harness.example(name), harness.TINY, **SIZES, kv_dtype="int8")
    for wrap in (lambda x: Prefill(method=x), lambda x: Stages(evict=harness.example("snapkv"), retrieve=x)):
        names = "AttentionMatching, MosaicKV, ShadowKV, ThinK"
        said = f"ThinK has .*; take kv_dtype=None, or a method other than {names}: all others take it"
        with pytest.raises(ValueError, match=said):
            kvjax.memory_needed(wrap(harness.example("think")), harness.TINY, **SIZES, kv_dtype="int8")
    with assume_machine("tpu"), pytest.raises(ValueError, match="Quest: offload must be False with .* on a TPU, .* got True"):
        kvjax.memory_needed(
            harness.example("quest", num_dense_layers=0, offload=True), harness.TINY, **SIZES, kv_dtype="int8"
        )
