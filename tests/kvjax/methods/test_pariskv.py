"""ParisKV beyond the generic comparison: regions over long rows, ties, shares as leaves, knobs that are refused."""

from __future__ import annotations

import math

import jax
import numpy as np
import pytest

from kvjax.methods import ParisKV
from kvjax.methods.pariskv import hashing
from kvjax.protocol.typing import EMPTY
from kvjax.testing import layer
from pallas_kernels.formats.key_codes import parts_of_rows
from tests.harness import drive, example, frequencies, random_tokens
from tests.kvjax.cases import against_oracle, drive_alike, feed_layer, prefill_layer
from tests.kvjax.methods.pariskv_cases import BUDGET, BUFFER, LOCAL, SINK, assert_equal_trees, assert_same_codes, index, store
from tests.oracles import pariskv as plain

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("pariskv")]
STREAM = 100  # decode steps of `test_regions_follow_the_stream`


# ---- regions ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_local, buffer", [(8, 3), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((4, 4), (2, 7), (2, 1)))]
)
def test_regions_follow_the_stream(num_local, buffer):
    """A hundred steps with the buffer shorter than, as long as, and longer than the local window."""
    lengths = np.array([33, 5])
    q, k, v = random_tokens(buffer, 2, 1, 2, 33 + STREAM, 16)
    got, _ = against_oracle("pariskv", (q, k, v), lengths, num_local=num_local, buffer=buffer)
    stop = np.asarray(got.state.aux.stop)
    tail = lengths + STREAM - stop
    assert np.all((stop - np.maximum(SINK, lengths - num_local)) % buffer == 0), "whole buffers"
    assert np.all((num_local - 1 <= tail) & (tail < num_local - 1 + buffer)), "room for the next step's token"
    check_metadata(got.state, lengths, STREAM, num_local, buffer)


@pytest.mark.parametrize("knobs", [{"dense_below": 30}, {"dense_below": 0}, {"dense_below": 14, "budget": 9}])
@pytest.mark.thorough
def test_prompts_around_every_edge(knobs):
    """Prompts around sink, sink + local and the dense threshold, whichever of its two terms decides."""
    sizes = {"num_sink": 5, "num_local": 7, "buffer": 6}
    lengths = np.array([1, 4, 5, 6, 11, 12, 13, 17, 18, 19, 28, 29, 30, 31])
    q, k, v = random_tokens(3, len(lengths), 1, 2, 31 + 24, 8)
    got, _ = against_oracle("pariskv", (q, k, v), lengths, **sizes, **knobs)
    total = lengths[None] + np.arange(24)[:, None] + 1
    enough = max(knobs["dense_below"], 12 + 2 * knobs.get("budget", BUDGET))
    dense = got.attended.sum(axis=-1)[..., 0] == total
    assert np.all(dense[total < enough])
    assert not dense[(total >= enough + 12)].any(), "sparse in the end"


@pytest.mark.thorough
def test_rows_without_a_zone_stay_dense():
    """Long enough by count but nothing in the zone yet: dense, until the first flush."""
    q, k, v = random_tokens(4, 1, 1, 1, 50, 8)
    knobs = {"num_sink": 2, "num_local": 3, "buffer": 20, "budget": 1, "dense_below": 0}
    got, _ = against_oracle("pariskv", (q, k, v), [4], **knobs)
    count = got.attended.sum(axis=-1)[:, 0, 0]  # step s is the decode of token 4 + s
    np.testing.assert_array_equal(count[:20], np.arange(5, 25))
    assert count[20] == 2 + 1 + 3, "25 tokens stored, which fill the buffer: 20 have moved, 3 stay near"


@pytest.mark.slow
def test_shares_are_traced():
    """rho and the budget below their bounds behave as if compiled for them, and compile nothing again."""
    q, k, v = random_tokens(12, 4, 2, 2, 40 + 10, 16)
    lengths = np.array([40, 29, 33, 17])
    compiled = None
    for rho, budget in ((0.5, 4), (0.07, 3)):
        against_oracle("pariskv", (q, k, v), lengths, fields={"capacity": BUDGET}, rho=rho, beta=0.05, budget=budget)
        compiled = compiled or layer._drive._cache_size()
        assert layer._drive._cache_size() == compiled


@pytest.mark.parametrize("length", [17, 4999, 5000, 9999, 10_000, 29_999, 30_000])
@pytest.mark.thorough
def test_schedule_by_zone_length(length):
    """The zone's length decides the shares, as in the oracle's schedule: their budgets show in the cost."""
    method = ParisKV(budget=6, num_sink=0, num_local=2, buffer=1, dense_below=0)
    cache = store(*np.ones((2, 1, 1, length + 1, 8), np.float32), room=1)  # for the token of the step that is counted
    slots, metadata = jax.jit(method.count)(cache, index(method, cache), None)
    candidates = plain.ceil(plain.schedule(length)[1] * length)
    assert slots[0, 0] == 6 + 1
    assert metadata[0, 0] == length + 8 * candidates  # 1 byte of identifiers; 4 of magnitudes, 2 of weight, 2 empty


@pytest.mark.thorough
@pytest.mark.parametrize("steps", [500, 2000])
def test_metadata_equals_rebuilt(steps):
    lengths = np.array([40, 3])
    q, k, v = random_tokens(6, 2, 1, 1, 40 + steps, 16)
    method = example("pariskv", num_local=6, buffer=11)
    got = drive(method, q, k, v, lengths, prompt=40, inv_freq=frequencies(16))
    check_metadata(got.state, lengths, steps, 6, 11)


def check_metadata(state, lengths, steps, num_local, buffer):
    """Metadata after many decode steps are exact, and the zone's clusters follow from the oracle's identifiers."""
    method = example("pariskv", num_local=num_local, buffer=buffer)
    assert_equal_trees(state.aux, jax.jit(type(method).index)(method, state.cache, state.aux.stop))
    for row, length in enumerate(lengths.tolist()):
        stop = plain.first_stop(length, SINK, num_local)
        for total in range(length + 1, length + steps + 2):
            stop = plain.next_stop(stop, total, num_local, buffer)
        assert stop == state.aux.stop[row]
        ids = np.asarray(state.aux.ids)[row, 0, SINK:stop]
        for b in range(ids.shape[1]):
            np.testing.assert_array_equal(state.aux.counts[row, 0, b], np.bincount(ids[:, b], minlength=256))
        np.testing.assert_array_equal(method.counters(state.aux, None)["retrieval"][row], stop - SINK)
    some = np.arange(5, steps, 199)
    magnitudes, weight = parts_of_rows(state.aux.rows[0, 0, some])
    codes = hashing.Codes(ids=state.aux.ids[0, 0, some], magnitudes=magnitudes, weight=weight)
    assert_same_codes(codes, np.asarray(state.cache.key)[0, 0, some])


@pytest.mark.parametrize("num_local, buffer", [(4, 4), (9, 2), (2, 5)])
@pytest.mark.thorough
def test_several_tokens_at_once_leave_the_metadata_of_single_tokens(num_local, buffer):
    """Pieces of many lengths, some rows shorter or idle, leave the metadata that tokens one by one leave."""
    method = example("pariskv", num_local=num_local, buffer=buffer)
    data, start = random_tokens(7, 3, 2, 1, 80, 8), np.array([9, 5, 1])

    def read():
        return prefill_layer(method, data, start, prompt=9, room=60)

    def go_on(state, length, count, width):
        at = np.where(np.arange(width) < count[:, None], length[:, None] + np.arange(width), EMPTY)
        return feed_layer(method, state, data, at)[1], length + count

    state, length = read(), start.copy()
    for count in ([13, 4, 0], [1, 1, 1], [7, 0, 13], [2, 13, 5]):
        state, length = go_on(state, length, np.array(count), 1 if max(count) == 1 else 13)
    assert_equal_trees(state.aux, jax.jit(type(method).index)(method, state.cache, state.aux.stop))
    one, at = read(), start.copy()
    while np.any(at < length):
        one, at = go_on(one, at, (at < length).astype(int), 1)
    assert_equal_trees(one.aux, state.aux)
    for row, (first, last) in enumerate(zip(start.tolist(), length.tolist())):
        stop = plain.next_stop(plain.first_stop(first, SINK, num_local), last + 1, num_local, buffer)
        assert stop == state.aux.stop[row]


# ---- ties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.1, pytest.param(0.5, marks=pytest.mark.thorough)])
def test_candidate_ties_are_cut_at_the_lower_index(beta):
    """Parallel keys share their clusters: only the first beta * n are candidates, of which the longest win."""
    rng = np.random.default_rng(15)
    direction = rng.normal(size=16)
    length = 2.0 ** rng.permutation(40)[:40]  # tells the estimates apart, whatever the rounding
    zone = 40 - SINK - LOCAL
    q, k, v = random_tokens(15, 4, 2, 2, 40 + 10, 16)
    k[:, :, SINK : SINK + zone] = (length[:zone, None] * direction).astype(np.float32)
    q[..., 40:, :] = 1e-9 * direction
    got, _ = against_oracle("pariskv", (q, k, v), [40] * 4, np.zeros(8, np.float32), beta=beta, rho=0.5)
    first = list(range(math.ceil(beta * zone)))
    longest = sorted(first, key=lambda i: -length[i])[:BUDGET]
    picked = set(np.flatnonzero(got.attended[0, 0, 0]).tolist())
    assert {i - SINK for i in picked if SINK <= i < SINK + zone} == set(longest)


@pytest.mark.slow
def test_whole_numbers_tie_exactly():
    """Keys of few directions and queries of whole numbers: what ties in exact arithmetic goes to the lower index."""
    rng = np.random.default_rng(16)
    q, k, v = random_tokens(16, 4, 2, 2, 40 + 10, 16)
    alphabet = np.concatenate([np.eye(16)[:6] * 4, -np.eye(16)[:6] * 4, np.zeros((1, 16))])
    k = alphabet[rng.integers(0, len(alphabet), k.shape[:3])].astype(np.float32)
    q = rng.integers(-2, 3, q.shape).astype(np.float32)
    q[1, ..., 41:46, :] = 0  # queries without a direction
    against_oracle("pariskv", (q, k, v), [40, 40, 30, 20], np.zeros(8, np.float32))


# ---- laws ---------------------------------------------------------------------------------------------------------


def test_needle_is_always_attended():
    """One key along the query, four times as long, in the sinks, the zone, the window or the buffer, and ever after."""
    spots, prompt, steps, dim = [0, 1, 2, 3, 17, 30, 35, 36, 39, 40, 43, 48], 40, 10, 16
    direction = np.random.default_rng(0).normal(size=dim)
    method = example("pariskv", budget=1, capacity=BUDGET, beta=0.1, rho=0.1)
    for four in (spots[:4], spots[4:8], spots[8:]):
        q, k, v = random_tokens(17, 4, 2, 2, prompt + steps, dim)
        q[..., prompt:, :] = direction
        for row, spot in enumerate(four):
            k[row, :, spot] = 4 * direction
        got = drive_alike(method, q, k, v, [prompt] * 4, np.zeros(dim // 2, np.float32))
        for row, spot in enumerate(four):
            for step in range(max(0, spot - prompt), steps):
                assert got.attended[step, row, :, spot].all(), f"needle at {spot}, step {step}"
        assert got.attended.sum(axis=-1).max() <= SINK + 1 + LOCAL + BUFFER
