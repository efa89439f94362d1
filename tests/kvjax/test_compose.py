"""Wrappers: what composes with what, and that a composition is what its parts say."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import kvjax
from kvjax.methods import H2O, Full, Quest, SnapKV, StreamingLLM
from tests.harness import example, read, stored, tiny_params
from tests.kvjax.cases import ONE, N, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")

SNAP = SnapKV(budget=20, obs_window=5)
QUEST = Quest(budget=8, page_size=4, num_dense_layers=0)


def tokens(method, **options):
    return np.asarray(go_on(read(method, **options)).tokens)


def shapes(run):
    """What ``run`` would return; it is traced and not compiled."""
    tiny_params()  # which are kept, and so must be made before
    return jax.eval_shape(run)


def test_per_layer_picks_by_index_and_from_the_end():
    method = kvjax.PerLayer(layers={0: SNAP, -1: H2O(budget=12)}, default=Full())
    assert (
        method.for_layer(0, 3) == SNAP and method.for_layer(1, 3) == Full() and method.for_layer(2, 3) == H2O(budget=12)
    )


def test_per_layer_storage_differs_by_layer():
    cache = shapes(lambda: read(kvjax.PerLayer(layers={0: StreamingLLM(budget=12, chunk=8)}, default=SNAP)))
    assert [stored(layer).num_slots for layer in cache.layers] == [12 + 8, 20 + 24]


@pytest.mark.thorough
def test_per_layer_of_one_method_is_that_method():
    np.testing.assert_array_equal(tokens(kvjax.PerLayer(layers={0: SNAP}, default=SNAP)), tokens(SNAP))


def test_per_layer_reaches_into_wrappers():
    """A wrapper's inner layers are resolved by the real layer index."""
    dense_first = kvjax.PerLayer(layers={}, default=Quest(budget=8, page_size=4, num_dense_layers=1))
    assert dense_first.for_layer(0, 2) == Full() and dense_first.for_layer(1, 2).page_size == 4
    stages = kvjax.Stages(evict=SNAP, retrieve=Quest(budget=8, page_size=4, num_dense_layers=1))
    assert stages.for_layer(0, 2).retrieve == Full() and stages.for_layer(1, 2).retrieve.page_size == 4


def test_quest_dense_layers_are_full():
    dense = example("quest", num_dense_layers=1)
    np.testing.assert_array_equal(tokens(dense, config=ONE), tokens(Full(), config=ONE))


@pytest.mark.thorough
def test_dense_below_everything_is_full_and_below_one_is_the_method():
    np.testing.assert_array_equal(tokens(kvjax.DenseBelow(length=1000, method=QUEST)), tokens(Full()))
    np.testing.assert_array_equal(tokens(kvjax.DenseBelow(length=1, method=QUEST)), tokens(QUEST))


def test_stages_hold_the_compressed_cache_only():
    full, both = (read(method, config=ONE) for method in (QUEST, kvjax.Stages(evict=SNAP, retrieve=QUEST)))
    assert stored(both.layers[0]).num_slots == 20 + 24 < stored(full.layers[0]).num_slots
    assert int(stored(both.layers[0]).valid.sum(axis=2).max()) <= 20


@pytest.mark.slow
def test_three_stages_and_a_wrapper_in_a_wrapper():
    inner = kvjax.DenseBelow(length=10, method=QUEST)
    method = kvjax.PerLayer(layers={0: Full()}, default=kvjax.Stages(evict=SNAP, retrieve=inner))
    got = shapes(lambda: go_on(read(method)).tokens)
    assert got.shape == (3, N)


def test_wrappers_are_pytrees_of_their_inner_numbers():
    """Nested hyper-parameters are leaves that a sweep can stack."""
    stages = kvjax.Stages(evict=SNAP, retrieve=QUEST)
    assert sorted(jax.tree.leaves(stages)) == [8, 20]
    doubled = jax.tree.map(lambda x: x // 2, stages)
    assert doubled.evict.budget == 10 and doubled.retrieve.budget == 4 and doubled.evict.capacity == 20


@pytest.mark.parametrize(
    "build",
    [
        lambda: kvjax.Stages(evict=H2O(budget=12), retrieve=QUEST),
        lambda: kvjax.Stages(evict=SNAP, retrieve=SNAP),
        lambda: kvjax.Stages(evict=StreamingLLM(budget=12), retrieve=QUEST),
        lambda: kvjax.DenseBelow(length=8, method=SNAP),
        lambda: kvjax.DenseBelow(length=8, method=StreamingLLM(budget=12)),
    ],
)
def test_impossible_pairs_are_refused_at_construction(build):
    with pytest.raises(ValueError, match="Stages|DenseBelow"):
        build()
