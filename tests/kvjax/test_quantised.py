"""Caches in 8 bits: a method does on them exactly what it does in a model whose keys and values have the rounded numbers."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.cache import LayerSpec
from kvjax.quantised import QuantisedCache, empty_resident, row_bytes
from kvjax.testing.subject import STEPS
from pallas_kernels.formats.quantised import MOST, dequantise, quantise
from tests.harness import (
    METHODS,
    ONE_LAYER,
    TINY,
    WRAPPERS,
    any_example,
    drive,
    example,
    group,
    padded,
    prompts,
    random_tokens,
    read,
    stored,
    tiny_params,
)
from tests.kvjax.cases import ask, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")
LENGTHS = np.array([40, 23, 9], np.int32)
OWN = ("mosaickv", "shadowkv", "think")  # methods with a storage of their own
LAYERS = [*ONE_LAYER, *(group(name) for name in WRAPPERS if name != "thinned")]
SIZES = {"batch": 2, "prompt_slots": 4096, "max_new_tokens": 64}


def but_own(params, slow):
    """Parameters without the methods in `OWN`; that of the name ``slow`` runs with the slow tests, the others thoroughly."""
    marks = {True: pytest.mark.slow, False: pytest.mark.thorough}
    return [
        pytest.param(*x.values, marks=[*x.marks, marks[x.values[0] == slow]]) for x in params if x.values[0] not in OWN
    ]


@functools.cache
def rows():
    return random_tokens(3, 3, 2, 2, 56, 16)


def rounded(x, kind):
    return np.asarray(dequantise(quantise(jnp.asarray(x), kind)))


@pytest.mark.parametrize("kind, chunk", [("int8", None), pytest.param("float8_e4m3fn", 7, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", but_own(LAYERS, slow="h2o"))
def test_rounds_keys_and_values_and_changes_nothing_else(name, kind, chunk):
    """Without rotation, so that the other run gets the rounded keys. Empty slots hold NaN."""
    q, k, v = rows()
    options = {"prompt": 48, "inv_freq": np.zeros(8, np.float32), "chunk": chunk}
    method = any_example(name)
    got = drive(method, q, k, v, LENGTHS, kv_dtype=kind, poison=True, **options)
    want = drive(method, q, rounded(k, kind), rounded(v, kind), LENGTHS, **options)
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(got.prompt[row, :, :, :length], want.prompt[row, :, :, :length], atol=1e-6)
    np.testing.assert_allclose(got.outputs, want.outputs, atol=1e-6)
    np.testing.assert_array_equal(got.attended, want.attended)
    np.testing.assert_array_equal(got.kept, want.kept)
    assert isinstance(stored(got.state), QuantisedCache) and not np.array_equal(k, rounded(k, kind))


@pytest.mark.thorough  # a case of the law above
@pytest.mark.parametrize("kind", MOST)
def test_a_prompt_in_chunks_and_steps_store_the_same_codes(kind):
    """`append` of a chunk at a place, of ragged tokens and of single tokens, and `append_rotated`."""
    spec = LayerSpec(
        layer=0, batch=3, num_kv_heads=2, group_size=2, head_dim=16, dtype="float32", prompt_slots=56, max_new_tokens=0,
        kv_dtype=kind,
    )  # fmt: skip
    q, k, v = (jnp.asarray(x[..., :6, :]) for x in rows())
    position = jnp.broadcast_to(jnp.arange(6, dtype=jnp.int32), (3, 6))
    empty = empty_resident(spec, 8)
    whole, ragged, one, rotated = empty.append(k, v, position, 0), empty.append(k, v, position), empty, empty
    for at in range(6):
        piece = k[:, :, at : at + 1], v[:, :, at : at + 1], position[:, at : at + 1]
        one = one.append(*piece)
        _, rotated = rotated.append_rotated(q[..., at : at + 1, :], *piece, jnp.zeros(8))
    for other in (ragged, one, rotated):
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(other), strict=True):
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(whole.key[:, :, :6], rounded(k, kind))
    np.testing.assert_array_equal(whole.keys_at(position[:, 2:3]), whole.key[:, :, 2:3])


@pytest.mark.parametrize("name", but_own(METHODS, slow="quest"))
def test_a_model_goes_on_from_it(name, tmp_path):
    """Generation in two calls, questions, forks and saved caches of ragged rows; and what the accounting says."""
    cache = read(any_example(name), kv_dtype="int8")
    assert cache.kv_dtype == "int8" and ", in int8)" in repr(cache)
    kvjax.save_cache(tmp_path / "cache", cache)
    params = tiny_params()
    half = kvjax.generate(params, kvjax.fork(cache), max_new_tokens=STEPS // 2, eos_token_ids=())
    rest = kvjax.generate(params, half.cache, max_new_tokens=STEPS - STEPS // 2, eos_token_ids=())
    loaded = kvjax.load_cache(tmp_path / "cache", config=TINY, method=any_example(name))
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    asked = ask(kvjax.fork(cache))
    once = go_on(cache)
    np.testing.assert_array_equal(np.concatenate([half.tokens, rest.tokens], axis=1), once.tokens)
    np.testing.assert_array_equal(go_on(loaded).tokens, once.tokens)
    assert np.isfinite(asked.logits).all()
    plain = go_on(read(any_example(name)))
    assert np.abs(once.cache.logits - plain.cache.logits).max() > 0
    np.testing.assert_array_equal(once.stats.length, plain.stats.length)
    assert np.all(once.stats.full_bytes_read < plain.stats.full_bytes_read)
    assert once.stats.resident_bytes < plain.stats.resident_bytes
    np.testing.assert_array_equal(once.stats.is_no_op, plain.stats.is_no_op)


@pytest.mark.thorough
def test_a_sweep_gives_what_single_runs_give():
    tokens, lengths = padded(prompts())
    settings = [example("h2o", budget=budget, capacity=12) for budget in (8, 12)]
    options = {"config": TINY, "max_new_tokens": STEPS, "kv_dtype": "int8", "lengths": lengths}
    for result in kvjax.sweep(tiny_params(), tokens, settings, eos_token_ids=(), **options):
        once = go_on(read(result.method, kv_dtype="int8"))
        np.testing.assert_array_equal(result.tokens, once.tokens)
        np.testing.assert_array_equal(result.stats.kv_bytes, once.stats.kv_bytes)


def test_bytes():
    """A slot of D numbers takes D bytes and a scale of 2, for the key and for the value."""
    config = dataclasses.replace(TINY, head_dim=128, dtype="bfloat16")
    full, small = (kvjax.memory_needed("full", config, **SIZES, kv_dtype=kind).device for kind in (None, "int8"))
    slots = 2 * 4160 * config.num_kv_heads * config.num_layers
    assert full - small == slots * 2 * (256 - 130)
    pieces = kvjax.memory_needed("full", config, **SIZES, chunk_size=1024, kv_dtype="float8_e4m3fn")
    # Of one row: the prompt as it reads back, and what a pass takes out of a layer, with positions and a cursor.
    row = config.num_kv_heads * (2 * 4096 * 256 + 4160 * (2 * 130 + 4)) + 4
    assert pieces.device == small and pieces.staged == row
    cache = jax.eval_shape(lambda: kvjax.step.blank_cache(kvjax.make("full"), config, kv_dtype="int8"))
    assert {state.cache.slot_bytes for state in cache.layers} == {260} == {row_bytes(128, "bfloat16", "int8")}
    assert row_bytes(128, "bfloat16", None) == 512


def test_refusals():
    with pytest.raises(ValueError, match="kv_dtype must be 'int8' or 'float8_e4m3fn', or None .*, got 'int4'"):
        kvjax.prefill({}, [[1, 2]], config=TINY, kv_dtype="int4")
    for name in OWN:
        called = registry.builtin()[name].__name__
        with pytest.raises(ValueError, match=f"{called} has a storage of its own and cannot run with kv_dtype='int8'"):
            kvjax.memory_needed(example(name), TINY, **SIZES, kv_dtype="int8")
    with pytest.raises(ValueError, match="Quest: offload must be False with kv_dtype='int8', got True"):
        kvjax.memory_needed(example("quest", num_dense_layers=0, offload=True), TINY, **SIZES, kv_dtype="int8")
