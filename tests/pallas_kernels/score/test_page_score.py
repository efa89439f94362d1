"""`page_score` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.score.page_score import pallas_tpu, pallas_triton
from tests.pallas_kernels.cases import (
    compiled,
    every_body,
    every_body_and_thorough_tpu,
    every_body_and_tpu,
    implementations,
    one_by_one,
    thorough,
)

TOLERANCE = 2e-5  # bounds of any dtype are read as they are, products are float32
RUN = implementations("page_score", config=pallas_triton.Config(block=16)) | {
    "interpreted_tpu": implementations("page_score", "pallas_tpu", config=pallas_tpu.Config(block=128))["interpreted"]
}


def given(seed, rows=2, heads=2, group=4, dim=32, pages=50, dtype="float32", bounds=True, per_head=False):
    """Query, bounds and limits; pages behind the limit are NaN, and a page in use has no token: inf and -inf, or NaN."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, heads, group, dim))
    low, high = np.sort(rng.normal(size=(2, rows, heads, pages, dim)), axis=0)
    limit = rng.integers(0, pages + 1, (rows, heads) if per_head else (rows,)).astype(np.int32)
    if limit.size > 1:
        limit.reshape(-1)[:2] = 0, pages
    behind = np.arange(pages) >= (limit if per_head else limit[:, None])[..., None]
    low, high = (np.where(behind[..., None], np.nan, x) for x in (low, high))
    low[:, :, 7], high[:, :, 7] = (np.inf, -np.inf) if bounds else (np.nan, np.nan)
    query, low, high = (jnp.asarray(x, dtype) for x in (query, low, high))
    return query, low, high if bounds else None, jnp.asarray(limit)


def oracle(query, low, high, limit, reduce, newest):
    query, low, high = (
        None if x is None else np.asarray(x.astype(jnp.float32), np.float64) for x in (query, low, high)
    )
    query, low = query[:, :, :, None], low[:, :, None]
    score = query * low if high is None else np.maximum(query * low, query * high[:, :, None])
    score = score if high is None else np.where(low == np.inf, -np.inf, score)
    score = score.sum(-1)
    score = score.max(2) if reduce == "max" else score.sum(2) if reduce == "sum" else score
    limit = np.asarray(limit).reshape(*limit.shape, *(1,) * (score.ndim - limit.ndim))
    page = np.arange(score.shape[-1])
    score = np.where((page < limit) & ~np.isnan(score), score, -np.inf)
    return np.where(page == limit - 1, np.inf, score) if newest else score


@every_body_and_thorough_tpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduce", ["max", "sum"])
@pytest.mark.parametrize(
    ("group", "dim", "pages", "bounds", "per_head", "newest"),
    [
        (3, 16, 50, True, False, True),
        (1, 16, 33, False, True, False),
        pytest.param(3, 16, 16, True, True, False, marks=thorough),
        pytest.param(4, 64, 50, True, False, True, marks=thorough),
        pytest.param(1, 128, 33, False, True, False, marks=thorough),
        pytest.param(4, 128, 300, True, True, True, marks=thorough),
    ],
)
def test_scores_equal_float64(name, dtype, reduce, group, dim, pages, bounds, per_head, newest):
    args = given(group, group=group, dim=dim, pages=pages, dtype=dtype, bounds=bounds, per_head=per_head)
    run = compiled(RUN[name], reduce=reduce, newest=newest)
    got = run(*args)
    assert got.dtype == jnp.float32 and got.shape == args[1].shape[:3]
    np.testing.assert_allclose(got, oracle(*args, reduce, newest), rtol=TOLERANCE, atol=TOLERANCE * dim)
    np.testing.assert_array_equal(got, run(*args))


@every_body
def test_scores_of_each_query_head(name):
    args = given(8, group=3, dim=16, dtype="bfloat16", per_head=True)
    got = compiled(RUN[name], reduce="each", newest=True)(*args)
    np.testing.assert_allclose(got, oracle(*args, "each", True), rtol=TOLERANCE, atol=TOLERANCE * 16)


@every_body
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=thorough)])
def test_tokens_between_two_slots_that_are_held(name, dtype):
    """Query heads apart; slots without a token are NaN, and so is one that has a token."""
    query, key, _, limit = given(9, group=3, dim=16, dtype=dtype, bounds=False)
    held = np.random.default_rng(9).random(key.shape[:3]) < 0.7
    key = jnp.where(held[..., None], key, jnp.nan)
    position = jnp.where(held, jnp.arange(key.shape[2], dtype=jnp.int32), -1)
    got = np.asarray(compiled(RUN[name], reduce="each", first=5)(query, key, None, limit, position=position))
    want = oracle(query, key, None, limit, "each", False)
    want = np.where(held[:, :, None] & (np.arange(key.shape[2]) >= 5), want, -np.inf)
    np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * 16)
    assert np.isfinite(want).any() and (want[..., :limit.max()] == -np.inf).any()


@every_body_and_thorough_tpu
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_a_query_of_more_bits_than_the_bounds(name, reduce):
    query, low, high, limit = given(5, dtype="bfloat16")
    query = query.astype(jnp.float32) * 1.001
    got = compiled(RUN[name], reduce=reduce)(query, low, high, limit)
    np.testing.assert_allclose(got, oracle(query, low, high, limit, reduce, False), rtol=2e-5, atol=1e-4)


@every_body_and_tpu
@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_limit_in_slots_and_a_query_in_two_parts(name, reduce):
    query, low, high, limit = given(6, group=3, dtype="bfloat16")
    added = jax.random.normal(jax.random.key(0), query.shape)
    run = compiled(RUN[name], page_size=5, reduce=reduce)
    got = run(query, low, high, jnp.maximum(5 * limit - 4, 0), added=added)
    want = oracle(query.astype(jnp.float32) + added, low, high, limit, reduce, False)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-4)


@every_body_and_thorough_tpu
def test_a_mapped_call_equals_calls_one_by_one(name):
    one_by_one(compiled(RUN[name]), *(given(seed, rows=1) for seed in (1, 2)), atol=1e-5)


def test_the_limit_of_pages_may_change_inside_a_loop():
    query, low, high, _ = given(3, rows=1)
    low, high = jnp.nan_to_num(low), jnp.nan_to_num(high)

    def body(step, total):
        return total + RUN["interpreted"](query, low, high, jnp.full((1,), step), newest=True)

    got = jax.lax.fori_loop(1, 4, body, jnp.zeros((1, 2, 50)))
    assert (np.asarray(got[..., :1]) == np.inf).all() and (np.asarray(got[..., 3:]) == -np.inf).all()
