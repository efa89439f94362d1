"""ParisKV's codes of keys, its estimates of scores, and the recall that the paper reports."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from kvjax.methods import ParisKV
from kvjax.methods.pariskv import hashing
from pallas_kernels.formats.sign_codes import random_planes
from tests.harness import example
from tests.kvjax.methods.pariskv_cases import DIMS, assert_same_codes, encoded, estimated, index, positions, select, store
from tests.oracles import pariskv as plain

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("pariskv_codes")]


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
    exact = queries.astype(np.float64) @ keys.astype(np.float64).T
    got = np.zeros((len(queries), 2))
    for at, query in enumerate(queries):
        truth = set(np.argsort(-exact[at])[:count].tolist())
        for column, budget in enumerate((most, count)):
            chosen = select(dataclasses.replace(method, budget=budget), cache, aux, query[None, None, None])
            zone = {i for i in positions(cache, chosen) if i < size}
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
