"""`vector_score` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.score.vector_score import pallas_tpu, pallas_triton, vector_score
from tests.pallas_kernels.cases import (
    compiled,
    every_body_and_dtype,
    every_body_and_tpu,
    implementations,
    in_dtypes,
    on_hopper,
    thorough,
)

TOLERANCE = 2e-5
RUN = (
    implementations("vector_score", config=pallas_triton.Config(block=16))
    | on_hopper(vector_score)
    | {"interpreted_tpu": implementations("vector_score", "pallas_tpu", config=pallas_tpu.Config(block=128))["interpreted"]}
)


def problem(seed, rows=2, heads=2, group=3, dim=16, vectors=50, dtype="float32", per_head=False):
    """Query, vectors and limits; vectors behind the limit are NaN, and so is one before it."""
    rng = np.random.default_rng(seed)
    query, vector = rng.normal(size=(rows, heads, group, dim)), rng.normal(size=(rows, heads, vectors, dim))
    limit = rng.integers(0, vectors + 1, (rows, heads) if per_head else (rows,)).astype(np.int32)
    if limit.size > 1:
        limit.reshape(-1)[:2] = 0, vectors
    behind = np.arange(vectors) >= (limit if per_head else limit[:, None])[..., None]
    vector = np.where(behind[..., None] | (np.arange(vectors) == 7)[:, None], np.nan, vector)
    return *(jnp.asarray(x, dtype) for x in (query, vector)), jnp.asarray(limit)


def oracle(query, vector, limit, reduce):
    query, vector = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, vector))
    score = query @ vector.swapaxes(2, 3)
    score = score.sum(2) if reduce == "sum" else score
    limit = np.asarray(limit).reshape(*limit.shape, *(1,) * (score.ndim - limit.ndim))
    return np.where((np.arange(score.shape[-1]) < limit) & ~np.isnan(score), score, -np.inf)


@in_dtypes(every_body_and_tpu)
@pytest.mark.parametrize(
    ("group", "dim", "vectors", "per_head"),
    [(3, 16, 33, True), pytest.param(1, 128, 33, True, marks=thorough), pytest.param(4, 64, 300, False, marks=thorough)],
)
def test_sums_over_the_group_equal_float64(name, dtype, group, dim, vectors, per_head):
    """With a float32 query that is added to a query of the dtype."""
    query, vector, limit = problem(group, group=group, dim=dim, vectors=vectors, dtype=dtype, per_head=per_head)
    added = jax.random.normal(jax.random.key(0), query.shape)
    run = compiled(RUN[name])
    for more in ({}, {"added": added}):
        got = run(query, vector, limit, **more)
        assert got.dtype == jnp.float32 and got.shape == vector.shape[:3]
        want = oracle(query.astype(jnp.float32) + more.get("added", 0), vector, limit, "sum")
        np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * dim)
        np.testing.assert_array_equal(got, run(query, vector, limit, **more))


@every_body_and_dtype
def test_tokens_between_two_slots_that_are_held(name, dtype):
    """Query heads apart; slots without a token are NaN, and so is one that has a token."""
    query, key, limit = problem(9, dtype=dtype)
    held = np.random.default_rng(9).random(key.shape[:3]) < 0.7
    key = jnp.where(held[..., None], key, jnp.nan)
    position = jnp.where(held, jnp.arange(key.shape[2], dtype=jnp.int32), -1)
    got = np.asarray(compiled(RUN[name], reduce="each", first=5)(query, key, limit, position=position))
    want = oracle(query, key, limit, "each")
    want = np.where(held[:, :, None] & (np.arange(key.shape[2]) >= 5), want, -np.inf)
    np.testing.assert_allclose(got, want, rtol=TOLERANCE, atol=TOLERANCE * 16)
    assert np.isfinite(want).any() and (want[..., : limit.max()] == -np.inf).any()
