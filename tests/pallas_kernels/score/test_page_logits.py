"""`page_logits` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._triton.split import Config
from tests.pallas_kernels.cases import SCALE, alike, compiled, every_body_and_dtype, implementations, one_shape

RUN = implementations("page_logits", config=Config(block=16, splits=3))
RUN = {name: functools.partial(run, scale=SCALE) for name, run in RUN.items()}


def problem(seed, group=3, dim=16, pages=90, dtype="float32"):
    """Rows with all, some and none of their pages in use; what takes no part is NaN, and so is one page that does."""
    rng = np.random.default_rng(seed)
    query, vector = rng.normal(size=(3, 2, group, dim)), rng.normal(size=(3, 2, pages, dim))
    limit, held = np.asarray([pages + 5, pages // 3, 0], np.int32), rng.random((3, 2, pages)) < 0.7
    held[0, 1] = False
    seen = held & (np.arange(pages) < limit[:, None, None])
    seen[0, 0, 7], held[0, 0, 7] = False, True
    vector[~seen] = np.nan
    return (*(jnp.asarray(x, dtype) for x in (query, vector)), jnp.asarray(limit)), jnp.asarray(held), seen


def oracle(query, vector, seen):
    """Float64 logits, and the log of their sum."""
    query, vector = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, vector))
    logits = np.where(seen[:, :, None], SCALE * query @ np.nan_to_num(vector).swapaxes(2, 3), -np.inf)
    with np.errstate(divide="ignore"):
        return logits, np.log(np.exp(logits).sum(axis=3))


@every_body_and_dtype
@pytest.mark.parametrize(("group", "dim", "pages"), one_shape((3, 16, 90), (1, 64, 5), (8, 128, 200), (4, 32, 48)))
def test_logits_and_denominators_equal_float64(name, dtype, group, dim, pages):
    (query, vector, limit), held, seen = problem(pages, group, dim, max(pages, 8), dtype)
    run = compiled(RUN[name])
    logits, lse = run(query, vector, limit, held=held)
    want, whole = oracle(query, vector, seen)
    assert logits.dtype == lse.dtype == jnp.float32 and lse.shape[:2] == (3, 2)
    np.testing.assert_allclose(logits, want, rtol=2e-5, atol=2e-5)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(np.log(np.exp(np.float64(lse)).sum(axis=2)), whole, rtol=2e-5, atol=2e-5)
    alike((logits, lse), run(query, vector, limit, held=held))
