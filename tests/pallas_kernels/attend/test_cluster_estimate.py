"""`cluster_estimate` against float64 NumPy: every implementation; NaN in clusters that are not chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._triton.split import Config
from pallas_kernels.numerics import merge_partials
from tests.pallas_kernels.cases import close, compiled, every_body_and_dtype, implementations, one_shape

ESTIMATE = implementations("cluster_estimate", config=Config(block=16, splits=3))


def clusters(seed, count, group=3, dim=16, dtype="float32"):
    """The second head has chosen none."""
    rng = np.random.default_rng(seed)
    logits, sums = 3 * rng.normal(size=(2, 2, group, count)), rng.normal(size=(2, 2, count, dim))
    chosen, size = rng.random((2, 2, count)) < 0.3, rng.integers(1, 40, (2, 2, count))
    chosen[:, 1] = False
    left_out = rng.random(chosen.shape) < 0.3
    among = chosen & ~left_out
    logits[np.broadcast_to(~among[:, :, None], logits.shape)], sums[~among], size[~among] = np.nan, np.nan, 0
    flags = jnp.asarray(chosen), jnp.asarray(left_out)
    return jnp.asarray(logits, jnp.float32), *flags, jnp.asarray(size, jnp.int32), jnp.asarray(sums, dtype)


@every_body_and_dtype
@pytest.mark.parametrize(("count", "dim"), one_shape((128, 16), (1, 16), (50, 64)))
def test_estimates_equal_float64(name, count, dim, dtype):
    logits, chosen, left_out, size, sums = clusters(count, count, dim=dim, dtype=dtype)
    out, lse = compiled(ESTIMATE[name])(logits, chosen, left_out, size, sums)
    assert np.isfinite(out).all() and out.dtype == lse.dtype == jnp.float32
    out, lse = jax.jit(merge_partials)(*(np.moveaxis(x, 2, 0) for x in (out, lse)))
    for r, h in np.ndindex(2, 2):
        among = np.flatnonzero(chosen[r, h] & ~left_out[r, h])
        weight = np.exp(np.float64(logits[r, h][:, among]))
        total = weight @ np.float64(size[r, h, among])
        want = weight @ np.float64(sums[r, h, among]) / np.where(total > 0, total, 1)[:, None]
        close(out[r, h], want, dtype)
        with np.errstate(divide="ignore"):
            close(lse[r, h], np.log(total), "float32")
