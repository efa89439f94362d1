"""`page_score` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.score.page_score import page_score, pallas_tpu, pallas_triton
from tests.pallas_kernels import cases

TOLERANCE = 2e-5  # bounds of any dtype are read as they are, products are float32
RUN = (
    cases.implementations("page_score", config=pallas_triton.Config(block=16))
    | cases.on_hopper(page_score)
    | {
        "interpreted_tpu": cases.implementations("page_score", "pallas_tpu", config=pallas_tpu.Config(block=128))[
            "interpreted"
        ]
    }
)


def problem(seed, rows=2, heads=2, group=4, dim=32, pages=50, dtype="float32", per_head=False):
    """Query, bounds and limits; pages behind the limit are NaN, and a page in use has no token: inf and -inf, or NaN."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, heads, group, dim))
    low, high = np.sort(rng.normal(size=(2, rows, heads, pages, dim)), axis=0)
    limit = rng.integers(0, pages + 1, (rows, heads) if per_head else (rows,)).astype(np.int32)
    if limit.size > 1:
        limit.reshape(-1)[:2] = 0, pages
    behind = np.arange(pages) >= (limit if per_head else limit[:, None])[..., None]
    low, high = (np.where(behind[..., None], np.nan, x) for x in (low, high))
    low[:, :, 7], high[:, :, 7] = np.inf, -np.inf
    return *(jnp.asarray(x, dtype) for x in (query, low, high)), jnp.asarray(limit)


def oracle(query, low, high, limit, reduce, newest):
    query, low, high = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, low, high))
    query, low = query[:, :, :, None], low[:, :, None]
    score = np.where(low == np.inf, -np.inf, np.maximum(query * low, query * high[:, :, None])).sum(-1)
    score = score.max(2) if reduce == "max" else score
    limit = np.asarray(limit).reshape(*limit.shape, *(1,) * (score.ndim - limit.ndim))
    page = np.arange(score.shape[-1])
    score = np.where((page < limit) & ~np.isnan(score), score, -np.inf)
    return np.where(page == limit - 1, np.inf, score) if newest else score


@cases.in_dtypes(cases.every_body_and_thorough_tpu)
@pytest.mark.parametrize(
    ("group", "dim", "pages", "per_head", "newest"),
    [
        (3, 16, 50, False, True),
        pytest.param(1, 16, 33, True, False, marks=cases.thorough),
        pytest.param(3, 16, 16, True, False, marks=cases.thorough),
        pytest.param(4, 64, 50, False, True, marks=cases.thorough),
        pytest.param(4, 128, 300, True, True, marks=cases.thorough),
    ],
)
def test_scores_equal_float64(name, dtype, group, dim, pages, per_head, newest):
    args = problem(group, group=group, dim=dim, pages=pages, dtype=dtype, per_head=per_head)
    run = cases.compiled(RUN[name], newest=newest)
    got = run(*args)
    assert got.dtype == jnp.float32 and got.shape == args[1].shape[:3]
    np.testing.assert_allclose(got, oracle(*args, "max", newest), rtol=TOLERANCE, atol=TOLERANCE * dim)
    np.testing.assert_array_equal(got, run(*args))


@cases.every_body
def test_scores_of_each_query_head(name):
    args = problem(8, group=3, dim=16, dtype="bfloat16", per_head=True)
    got = cases.compiled(RUN[name], reduce="each", newest=True)(*args)
    np.testing.assert_allclose(got, oracle(*args, "each", True), rtol=TOLERANCE, atol=TOLERANCE * 16)


@cases.every_body_and_tpu
def test_limit_in_slots_and_a_query_of_more_bits_than_the_bounds(name):
    query, low, high, limit = problem(6, group=3, dtype="bfloat16")
    query = query.astype(jnp.float32) * 1.001
    got = cases.compiled(RUN[name], page_size=5)(query, low, high, jnp.maximum(5 * limit - 4, 0))
    np.testing.assert_allclose(got, oracle(query, low, high, limit, "max", False), rtol=2e-5, atol=1e-4)
