"""Layers with a sliding window store their window, whatever the method; the method applies to the other layers.

Their logits and laws are in `tests/kvjax/test_kinds_of_models.py`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import rope
from kvjax.accounting.stats import step_cost
from kvjax.cache import PlainCache
from kvjax.decoding.decode import run_extend, run_step
from kvjax.decoding.layers import layer_methods
from kvjax.decoding.sliding_window import SlidingWindow, window_attention
from kvjax.protocol.typing import layer_windows
from tests import harness

pytestmark = pytest.mark.usefixtures("quick_compile")
FIRST = dataclasses.replace(harness.TINY, windows=(6, None))  # the second layer is the method's
EVERY = dataclasses.replace(harness.TINY, windows=(6, 17))
QUESTIONS = [[5, 9, 2, 7], [8], []]
STEPS = 8


# ---- one layer ----------------------------------------------------------------------------------------------------


def masked(q, k, v, window):
    """Causal attention with a window in float64 loops: rotated q [G, T, D], k and v [T, D] to [G, T, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    for group, i in np.ndindex(q.shape[:2]):
        seen = [j for j in range(len(k)) if i - window < j <= i]
        weight = np.exp(k[seen] @ q[group, i] / np.sqrt(q.shape[-1]))
        out[group, i] = weight @ v[seen] / weight.sum()
    return out


LENGTHS = np.array([1, 5, 6, 7, 23])


@pytest.mark.parametrize(
    ("window", "chunk"),
    [
        (6, 5),
        pytest.param(6, None, marks=pytest.mark.thorough),
        pytest.param(1, 7, marks=pytest.mark.thorough),
        pytest.param(23, 4, marks=pytest.mark.thorough),
        pytest.param(24, None, marks=pytest.mark.thorough),
        pytest.param(99, 8, marks=pytest.mark.thorough),
    ],
)
def test_a_layer_attends_to_its_window_and_stores_nothing_else(window, chunk):
    q, k, v = harness.random_tokens(0, len(LENGTHS), 2, 2, LENGTHS.max() + STEPS, 8)
    method = SlidingWindow(window=window)
    got = harness.drive(method, q, k, v, LENGTHS, prompt=int(LENGTHS.max()), chunk=chunk, poison=True)
    at = np.arange(q.shape[-2], dtype=np.int32)
    q, k = (np.asarray(rope.rotate(x, at, harness.frequencies(8))) for x in (q, k))
    for row, length in enumerate(LENGTHS):
        end = length + STEPS
        for head in range(2):
            want = masked(q[row, head, :, :end], k[row, head, :end], v[row, head, :end], window)
            np.testing.assert_allclose(got.prompt[row, head, :, :length], want[:, :length], atol=1e-5)
            np.testing.assert_allclose(got.outputs[:, row, head], want[:, length:].swapaxes(0, 1), atol=1e-5)
        for step in range(STEPS):
            inside = range(max(0, length + step + 1 - window), length + step + 1)
            for held in (got.attended, got.kept):
                assert set(np.flatnonzero(held[step, row].all(axis=0))) == set(inside)
                assert set(np.flatnonzero(held[step, row].any(axis=0))) == set(inside)
    assert got.state.num_slots == min(window, -(-23 // (chunk or 23)) * (chunk or 23) + STEPS)
    cost = method.cost(got.state, None)
    np.testing.assert_array_equal(cost.attended, np.minimum(LENGTHS + STEPS, window))
    np.testing.assert_array_equal(cost.kv_bytes, np.minimum(LENGTHS + STEPS, window) * 2 * 2 * 8 * 4)


def test_queries_in_blocks_attend_as_all_at_once(monkeypatch):
    """A prompt far longer than its window is read in blocks of queries, and each meets only the keys near it."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(1, 1, 2, 50, 8)), rng.normal(size=(1, 1, 56, 8)), rng.normal(size=(1, 1, 56, 8))
    q, k, v = (x.astype(np.float32) for x in (q, k, v))
    v[:, :, :2] = np.nan
    present = np.arange(56)[None] >= 2
    monkeypatch.setattr("kvjax.decoding.sliding_window._LOGITS", 7 * 16)
    lowered = jax.jit(functools.partial(window_attention, window=7)).lower(q, k, v, present)
    assert "x50x56x" not in lowered.as_text() and "x16x22x" in lowered.as_text()
    got = np.asarray(lowered.compile()(q, k, v, present))
    whole = np.concatenate([np.zeros((2, 4, 8)), q[0, 0]], axis=1)
    np.testing.assert_allclose(got[0, 0], masked(whole, k[0, 0, 2:], v[0, 0, 2:], 7)[:, 4:], atol=1e-5)


# ---- which layers have a window -----------------------------------------------------------------------------------


def test_a_method_runs_in_the_layers_without_a_window_only():
    quest = harness.example("quest", num_dense_layers=0)
    methods = layer_methods(quest, dataclasses.replace(harness.TINY, num_layers=4, windows=(None, 6, None, 17)))
    assert methods == (quest, SlidingWindow(window=6), quest, SlidingWindow(window=17))
    assert layer_methods(quest, harness.TINY) == (quest, quest)


def test_windows_of_a_model_of_ones_own():
    @dataclasses.dataclass(frozen=True)
    class Windows:
        num_layers: int = 2
        windows: tuple = ()

    assert layer_windows(Windows()) == (None, None) and layer_windows(Windows(windows=(None, 3))) == (None, 3)
    for wrong in ((3,), (3, 0), (3, 2.0), (3, True)):
        with pytest.raises(ValueError, match="a whole number of tokens or None for each of 2 layers, got"):
            layer_windows(Windows(windows=wrong))

    class Silent:
        num_layers = 2

    assert layer_windows(Silent()) == (None, None)


def test_memory_covers_the_window_alone():
    sizes = {"batch": 1, "prompt_slots": 64, "max_new_tokens": 8, "chunk_size": 16}
    full, some, every = (kvjax.memory_needed("full", x, **sizes).device for x in (harness.TINY, FIRST, EVERY))
    slot = harness.TINY.num_kv_heads * (2 * harness.TINY.head_dim * 4 + 4)  # key, value and position
    assert full - some == (72 - 6) * slot and full - every == (2 * 72 - 6 - 17) * slot
    away = kvjax.memory_needed(harness.example("quest", num_dense_layers=0, offload=True), FIRST, **sizes, order="chunks")
    assert away.host == harness.TINY.num_kv_heads * 72 * 2 * harness.TINY.head_dim * 4, (
        "a layer with a window stays on the device"
    )


# ---- the whole model ----------------------------------------------------------------------------------------------


def read(config, method, rows=None, **options):
    tokens, lengths = harness.padded(harness.prompts() if rows is None else rows)
    options = {"pad_multiple": 1, "max_new_tokens": 24, **options}
    return kvjax.prefill(harness.tiny_params(), tokens, lengths=lengths, config=config, method=method, **options)


def check_windows(config, cache):
    """Assert that layers with a window hold its slots and no others, and those without are the method's."""
    for window, state in zip(config.windows, cache.layers, strict=True):
        if window is not None:
            assert type(state) is PlainCache and state.key.shape[2] == state.position.shape[2] == window


def test_statistics_count_the_window():
    cache = read(FIRST, "full")
    check_windows(FIRST, cache)
    stats = jax.jit(step_cost)(cache)
    assert stats.is_no_op.all()
    np.testing.assert_array_equal(stats.full_bytes_read, (stats.length + 6) * 2 * 8 * 4 * 2)
    np.testing.assert_array_equal(stats.visible, (stats.length + 6) / 2)


def after(config, method):
    """The shapes of a cache after a prompt, a question and a decode step."""

    def run():
        cache = run_extend(harness.tiny_params(), read(config, method), *map(jnp.asarray, harness.padded(QUESTIONS, 4)))
        return run_step(harness.tiny_params(), cache, jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1), bool))

    return jax.eval_shape(run)


@pytest.mark.parametrize("name", harness.repeated(harness.METHODS, but=["chess"]))
def test_a_model_of_windows_only_runs_under_every_method(name):
    """Every method is then `Full` over windows: same shapes, and no shared state."""
    cache = after(dataclasses.replace(EVERY, dtype="bfloat16"), harness.any_example(name))
    check_windows(EVERY, cache)
    assert cache.shared is None
    assert {x.dtype for state in cache.layers for x in (state.key, state.value)} == {jnp.dtype("bfloat16")}


def test_state_that_layers_share_is_of_the_layers_without_a_window():
    method = harness.example("chess")
    plain, windowed = after(harness.TINY, method), after(FIRST, method)
    check_windows(FIRST, windowed)
    shapes = [[x.shape for x in jax.tree.leaves(cache.layers[1])] for cache in (plain, windowed)]
    assert shapes[0] == shapes[1]
    width = [cache.shared.tree.mean_keys.shape[2] for cache in (plain, windowed)]
    assert width == [2 * 2 * 8, 2 * 8] and windowed.shared.num_layers == 1
