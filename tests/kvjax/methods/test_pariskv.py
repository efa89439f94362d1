"""ParisKV beyond the generic comparison: codes of keys, estimates, recall, regions over long rows, ties."""

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.cache.storage import empty_cache
from kvjax.methods import ParisKV
from kvjax.methods.pariskv import hashing
from kvjax.protocol.method import Step
from kvjax.protocol.typing import EMPTY
from pallas_kernels.formats.key_codes import parts_of_rows
from pallas_kernels.formats.sign_codes import random_planes
from tests.harness import example, random_tokens
from tests.kvjax.cases import against_oracle, feed_layer, prefill_layer
from tests.oracles import pariskv as plain

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("pariskv")]
SINK, LOCAL, BUFFER, BUDGET = (plain.KNOBS[x] for x in ("num_sink", "num_local", "buffer", "budget"))  # 2, 4, 4, 5
DIMS = (8, 16, 64, 128)
STREAM = 100  # decode steps of `test_regions_follow_the_stream`


def store(k, v, room=0):
    """A cache holding rotated k [B, H, T, D] and v in its first slots."""
    batch, heads, tokens, dim = k.shape
    at = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], (batch, tokens))
    return empty_cache(batch, heads, tokens + room, dim, "float32").append(jnp.asarray(k), jnp.asarray(v), at, 0)


@jax.jit
def index(method, cache):
    return method.compress(cache, None, 0)[1]


@functools.partial(jax.jit, static_argnames="rotate")
def encoded(keys, seed=42, rotate=True):
    """`hashing.Codes` of keys float32 [..., D]."""
    dim = keys.shape[-1]
    turned = hashing.rotation(keys, hashing.random_signs(seed, dim)) if rotate else keys
    return hashing.encode(turned, hashing.rotation_scale(dim) if rotate else 1.0)


@jax.jit
def estimated(query, codes):
    """Estimate of q.k of queries [Q, D] with the codes of N keys: [Q, N]."""
    dim = query.shape[-1]
    turned = hashing.rotation(query, hashing.random_signs(42, dim))
    return jax.vmap(
        lambda one: hashing.estimate(
            one[None, None], codes.magnitudes[None, None], codes.weight[None, None], hashing.rotation_scale(dim)
        )[0, 0]
    )(turned)


def assert_same_codes(codes, keys, seed=42, rotate=True):
    """Compare `hashing.Codes` of keys [N, D] with the oracle's, bit for bit."""
    dim = keys.shape[1]
    signs, matrix = plain.random_signs(dim, seed), plain.hadamard(dim)
    for i, key in enumerate(keys):
        want = plain.encode(key, signs, matrix, rotate=rotate)
        np.testing.assert_array_equal(codes.ids[i], want.ids, err_msg=f"ids of key {i}")
        nibble = (want.level + 8 * want.sign).reshape(-1)
        np.testing.assert_array_equal(np.asarray(codes.magnitudes[i]) & 15, nibble[0::2], err_msg=f"key {i}")
        np.testing.assert_array_equal(np.asarray(codes.magnitudes[i]) >> 4, nibble[1::2], err_msg=f"key {i}")
        np.testing.assert_array_equal(np.asarray(codes.weight[i], np.float64), want.weight, err_msg=f"key {i}")


# ---- codes --------------------------------------------------------------------------------------------------------


@functools.cache
def random_keys(dim):
    """Random keys of very different length, and two zero keys: float32 [50, dim]."""
    rng = np.random.default_rng(dim)
    keys = rng.normal(size=(48, dim)) * 10.0 ** rng.uniform(-3, 3, (48, 1))
    return np.concatenate([keys, np.zeros((1, dim)), -np.zeros((1, dim))]).astype(np.float32)


@pytest.mark.parametrize("dim", [pytest.param(dim, marks=[pytest.mark.thorough] * (dim not in (16, 128))) for dim in DIMS])
def test_codes_equal_the_oracle(dim):
    """Zero counts as positive in all channels, and weighs nothing."""
    codes = encoded(random_keys(dim))
    assert codes.ids.dtype == codes.magnitudes.dtype == jnp.uint8 and codes.weight.dtype == jnp.bfloat16
    assert_same_codes(codes, random_keys(dim))
    np.testing.assert_array_equal(codes.ids[-2:], 255)
    np.testing.assert_array_equal(codes.magnitudes[-2:], 0x88)
    np.testing.assert_array_equal(codes.weight[-2:], 0)


def test_another_seed_gives_other_codes():
    codes = encoded(random_keys(16), seed=7)
    assert_same_codes(codes, random_keys(16), seed=7)
    assert np.any(np.asarray(codes.ids) != np.asarray(encoded(random_keys(16)).ids))


def test_sparse_slices_and_single_channels():
    """Without rotation: a key of one channel puts its slice into the last level and leaves the others at radius 0."""
    keys = np.zeros((4, 16), np.float32)
    keys[0, 3], keys[1, 12], keys[2, 0], keys[3, :] = 5, -2, 1e-3, -1
    codes = encoded(keys, rotate=False)
    assert_same_codes(codes, keys, rotate=False)
    np.testing.assert_array_equal(codes.ids, [[255, 255], [255, 255 - 16], [255, 255], [0, 0]])
    np.testing.assert_allclose(np.asarray(codes.weight, np.float64)[0], [5 / 0.7633, 0], rtol=4e-3)


def test_bytes_per_token_and_head():
    """16 of identifiers, 64 of magnitudes, 32 of weights at D = 128; in the state 32 more, that fill up a line."""
    assert sum(x.nbytes for x in jax.tree.leaves(encoded(random_keys(128)))) == 50 * 112
    aux = jax.eval_shape(lambda k: index(example("pariskv"), store(k, k)), np.zeros((1, 2, 40, 128), np.float32))
    assert sum(x.size * x.dtype.itemsize for x in (aux.ids, aux.rows)) == 2 * 40 * (112 + 32)


def test_the_estimator_has_its_bias_and_error_on_gaussian_keys():
    """Gaussian keys: mean alpha .992, slope 1.000 (.992 without alpha), error .074 of the deviation of q.k."""
    rng = np.random.default_rng(0)
    dim, count = 128, 20_000
    keys, query = (rng.normal(size=(n, dim)).astype(np.float32) for n in (count, 32))
    codes = encoded(keys)
    exact = query.astype(np.float64) @ keys.astype(np.float64).T
    got = np.asarray(estimated(query, codes), np.float64)
    slope = (got * exact).sum() / (exact**2).sum()
    assert slope == pytest.approx(1.0, abs=1.5e-3)
    assert np.sqrt(np.mean((got - exact) ** 2)) / exact.std() == pytest.approx(0.074, abs=1.5e-3)
    turned = jax.jit(lambda keys: hashing.rotation(keys, hashing.random_signs(42, dim)))(keys)
    turned = np.asarray(turned, np.float64) / math.sqrt(dim)
    radius = np.linalg.norm(turned.reshape(count, -1, 8), axis=2)
    alpha = radius / np.asarray(codes.weight, np.float64)
    assert alpha.mean() == pytest.approx(0.992, abs=1e-3) and 0.70 < alpha.min() < 0.85
    plainly = dataclasses.replace(codes, weight=radius.astype(ml_dtypes.bfloat16))
    got = np.asarray(estimated(query, plainly), np.float64)
    assert (got * exact).sum() / (exact**2).sum() == pytest.approx(0.992, abs=1.5e-3)


def test_estimates_equal_the_oracle():
    keys = random_keys(16) / np.linalg.norm(random_keys(16), axis=1, keepdims=True).clip(1e-6)
    query = np.random.default_rng(3).normal(size=(2, 16)).astype(np.float32)
    got = np.asarray(estimated(query, encoded(keys)))
    signs, matrix = plain.random_signs(16), plain.hadamard(16)
    codes = [plain.encode(key, signs, matrix) for key in keys]
    want = [[plain.estimate(code, matrix @ (signs * one)) for code in codes] for one in query]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_shares_are_rounded_up_as_if_exact():
    """ceil(n * rho * z) of the schedule's decimals, at every zone length up to 40,000; the oracle agrees."""
    lengths = np.arange(1, 40_000)
    for rho, beta in ((0.5, 0.5), (0.3, 0.25), (0.25, 0.20), (0.20, 0.10), (0.3, 0.12)):
        for share, tier in [(beta, 1.0), *((rho, tier) for tier in plain.TIERS)]:
            exact = Fraction(str(share)) * Fraction(str(tier))
            want = -(-lengths * exact.numerator // exact.denominator)
            given = jnp.float32(share) * jnp.float32(tier)
            got = jax.jit(hashing.share_of)(given, jnp.asarray(lengths, jnp.int32))
            np.testing.assert_array_equal(got, want, err_msg=f"{share} * {tier}")
            some = slice(None, None, 997)
            np.testing.assert_array_equal([plain.ceil(int(n) * share * tier) for n in lengths[some]], want[some])


# ---- recall -------------------------------------------------------------------------------------------------------


def gaussian(rng, keys, queries, dim):
    return rng.normal(size=(keys, dim)), rng.normal(size=(queries, dim))


def low_rank(rng, keys, queries, dim):
    """Rank 24, with a common mean of half a deviation per channel and noise of .2 (keys) and .3 (queries)."""
    basis = rng.normal(size=(24, dim)) / math.sqrt(24)
    k = 0.5 * rng.normal(size=dim) + rng.normal(size=(keys, 24)) @ basis + 0.2 * rng.normal(size=(keys, dim))
    return k, rng.normal(size=(queries, 24)) @ basis + 0.3 * rng.normal(size=(queries, dim))


@pytest.mark.parametrize(
    "make, coarse, final", [pytest.param(gaussian, 0.735, 0.73, marks=pytest.mark.thorough), (low_rank, 0.985, 0.935)]
)
@pytest.mark.slow
def test_most_of_the_true_best_keys_are_picked(make, coarse, final):
    """Share of the true 100 best of 32,768 keys among the candidates (a tenth) and among the 100 picked."""
    size, count, dim = 32_768, 100, 128
    keys, queries = (x.astype(np.float32) for x in make(np.random.default_rng(23), size, 24, dim))
    last = np.ones((1, dim), np.float32)  # one token of local window and the token being decoded
    k = np.concatenate([keys, last, last])[None, None]
    most = math.ceil(0.1 * size)
    method = ParisKV(budget=count, capacity=most, num_sink=0, num_local=2, buffer=2, dense_below=0)
    cache = store(k, k)
    aux = index(method, cache)
    assert aux.stop[0] == size

    @jax.jit
    def select(method, cache, aux, query):
        """Choose for a decode step with a rotated query [D]; ParisKV reads nothing else of it."""
        zero = jnp.zeros((1, 1), jnp.int32)
        chosen = method.select(cache, aux, Step(query=query[None, None, None, None], position=zero, tokens=zero, shared=None))
        return chosen.slots, chosen.mask

    exact = queries.astype(np.float64) @ keys.astype(np.float64).T
    got = np.zeros((len(queries), 2))
    for at, query in enumerate(queries):
        truth = set(np.argsort(-exact[at])[:count].tolist())
        for column, budget in enumerate((most, count)):
            slots, mask = select(dataclasses.replace(method, budget=budget), cache, aux, query)
            zone = {i for i in np.asarray(slots[0, 0])[np.asarray(mask[0, 0])].tolist() if i < size}  # slots are positions
            assert len(zone) == budget
            got[at, column] = len(truth & zone) / count
    assert got.mean(axis=0) == pytest.approx([coarse, final], abs=0.03)


@pytest.mark.parametrize("switch", [lambda: jax.default_prng_impl("rbg"), lambda: jax.threefry_partitionable(False)])
def test_switches_of_random_numbers_change_no_stored_code(switch):
    """A cache that was saved without them is read under them."""
    want = hashing.random_signs(3, 16), random_planes(3, 2, 3, 8)
    with switch():
        for draw in (lambda run: run, jax.jit):
            got = draw(lambda seed: (hashing.random_signs(seed, 16), random_planes(seed, 2, 3, 8)))(3)
            jax.tree.map(np.testing.assert_array_equal, got, want)


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


def check_metadata(state, lengths, steps, num_local, buffer):
    """Metadata after many decode steps are exact, and the zone's clusters follow from the oracle's identifiers."""
    method = example("pariskv", num_local=num_local, buffer=buffer)
    jax.tree.map(np.testing.assert_array_equal, state.aux, jax.jit(type(method).index)(method, state.cache, state.aux.stop))
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
    jax.tree.map(np.testing.assert_array_equal, state.aux, jax.jit(type(method).index)(method, state.cache, state.aux.stop))
    one, at = read(), start.copy()
    while np.any(at < length):
        one, at = go_on(one, at, (at < length).astype(int), 1)
    jax.tree.map(np.testing.assert_array_equal, one.aux, state.aux)
    for row, (first, last) in enumerate(zip(start.tolist(), length.tolist())):
        stop = plain.next_stop(plain.first_stop(first, SINK, num_local), last + 1, num_local, buffer)
        assert stop == state.aux.stop[row]


# ---- ties ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [None, pytest.param(0.1, marks=pytest.mark.thorough)])
def test_candidate_ties_are_cut_at_the_lower_index(beta):
    """Parallel keys share their clusters: only the first beta * n are candidates, of which the longest win."""
    rng = np.random.default_rng(15)
    direction = rng.normal(size=16)
    length = 2.0 ** rng.permutation(40)[:40]  # tells the estimates apart, whatever the rounding
    zone = 40 - SINK - LOCAL
    q, k, v = random_tokens(15, 4, 2, 2, 40 + 10, 16)
    k[:, :, SINK : SINK + zone] = (length[:zone, None] * direction).astype(np.float32)
    q[..., 40:, :] = 1e-9 * direction
    shares = {} if beta is None else {"beta": beta, "rho": 0.5}
    got, _ = against_oracle("pariskv", (q, k, v), [40] * 4, np.zeros(8, np.float32), **shares)
    first = list(range(math.ceil((beta or plain.schedule(zone)[1]) * zone)))
    longest = sorted(first, key=lambda i: -length[i])[:BUDGET]
    picked = set(np.flatnonzero(got.attended[0, 0, 0]).tolist())
    assert {i - SINK for i in picked if SINK <= i < SINK + zone} == set(longest)
