"""What a decode step reads, split: keys and values, metadata, what crosses the bus, weights."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from tests import harness
from tests.harness import example, prompts, tiny_params
from tests.kvjax.cases import ONE, N, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")
ROW = 2 * ONE.head_dim * 4  # bytes of one key and one value in float32
LAYER = ONE.num_kv_heads * ROW  # of one token in one layer


def stats_of(method):
    return go_on(harness.read(method, config=ONE)).stats


def test_full_reads_every_key_and_value_and_nothing_else():
    stats = stats_of(kvjax.methods.Full())
    lengths = np.array([len(row) + N for row in prompts()])
    np.testing.assert_array_equal(stats.kv_bytes, lengths * LAYER * ONE.num_layers)
    np.testing.assert_array_equal(stats.metadata_bytes, 0)
    np.testing.assert_array_equal(stats.bus_bytes, 0)
    np.testing.assert_array_equal(stats.bytes_read, stats.full_bytes_read)


def test_quest_reads_the_bounds_of_its_pages_beside_what_it_attends_to():
    stats = stats_of(example("quest", num_dense_layers=0))
    pages = -(-np.array([len(row) + N for row in prompts()]) // 4)
    np.testing.assert_allclose(stats.kv_bytes, np.asarray(stats.attended) * LAYER * ONE.num_layers, rtol=1e-6)
    np.testing.assert_array_equal(stats.metadata_bytes, pages * LAYER * ONE.num_layers)  # a minimum and a maximum each


@pytest.mark.parametrize(
    "name",
    ["quest", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("tokenselect", "freekv", "pqcache", "retroinfer"))],
)
def test_only_rows_without_a_copy_cross_the_bus(name):
    knobs = {"num_dense_layers": 0} if name == "quest" else {}
    resident, offloaded = (stats_of(example(name, **knobs, offload=share)) for share in (False, True))
    for part in ("kv_bytes", "metadata_bytes", "attended"):
        np.testing.assert_array_equal(getattr(resident, part), getattr(offloaded, part))
    assert not resident.bus_bytes.any() and resident.host_bytes == 0 < offloaded.host_bytes
    assert (offloaded.bus_bytes <= offloaded.kv_bytes).all()
    assert ("over the bus" in offloaded.summary()) == bool(offloaded.bus_bytes.any())


@pytest.mark.slow
def test_an_offloaded_step_that_attends_to_more_than_its_copies_says_so():
    """The newest 64 tokens have copies; everything else that a step attends to crosses the bus."""
    method = example("quest", budget=112, num_dense_layers=0, offload=True)
    row = np.random.default_rng(0).integers(0, 60, 100).tolist()
    cache = kvjax.prefill(tiny_params(), [row], config=ONE, method=method, max_new_tokens=20, pad_multiple=4)
    stats = kvjax.generate(tiny_params(), cache, max_new_tokens=2, eos_token_ids=()).stats
    np.testing.assert_array_equal(stats.bus_bytes, (102 - 64) * LAYER * ONE.num_layers)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "near", "row"),
    [
        ("socket", 2 + 4, ROW),
        ("retrievalattention", 2 + 5 + 4, ROW / 2),  # the four tokens that came since the prompt are near
        ("magicpig", 2 + 3 + 4, ROW / 2),
    ],
)
def test_what_a_scan_finds_crosses_the_bus(name, near, row):
    """Sinks and near tokens have copies. Where a step reads keys on the device, only values cross."""
    method = example(name, offload=True)
    cache = kvjax.prefill(tiny_params(), prompts(), config=ONE, method=method, max_new_tokens=4)
    stats = kvjax.generate(tiny_params(), cache, max_new_tokens=4, eos_token_ids=()).stats
    far = np.maximum(np.asarray(stats.attended) - near, 0) * ONE.num_kv_heads
    assert far.max() > 0
    np.testing.assert_allclose(stats.bus_bytes, far * row * ONE.num_layers, rtol=1e-6)


def test_weights_are_read_once_for_all_rows():
    stats = stats_of(kvjax.methods.Full())
    params = tiny_params()
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    table = params["embed"]["embedding"]
    assert stats.weight_bytes == total - table.nbytes + 3 * ONE.hidden_size * 4
    tied = dataclasses.replace(ONE, tie_word_embeddings=True)
    assert tied.weight_bytes(params, 3) == total
    assert "of weights for all rows" in stats.summary() and "no effect" in stats.summary()
    more = dataclasses.replace(stats, attended=1.5 * stats.attended)  # as under `Verified`
    assert "no effect" not in more.summary()
