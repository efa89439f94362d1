"""`merge_splits` against float64 NumPy, on every implementation."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.cases import close, compiled, every_body_and_dtype, implementations, one_shape

MERGE = implementations("merge_splits")


def partials(seed, parts, dim=64, lists=3, group=3):
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(lists, parts, group, dim)).astype(np.float32)
    lse = 3 * rng.normal(size=out.shape[:3]).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[1] = -np.inf
    out[lse == -np.inf] = np.nan
    return jnp.asarray(out), jnp.asarray(lse)


@every_body_and_dtype
@pytest.mark.parametrize(("parts", "dim"), one_shape((5, 80), (1, 64), (49, 128)))
def test_merge_equals_float64(name, parts, dim, dtype):
    out, lse = partials(parts, parts, dim)
    merged, whole = compiled(MERGE[name], dtype=dtype)(out, lse)
    weight = np.exp(np.float64(lse))
    total = weight.sum(1)
    expected = (np.nan_to_num(np.float64(out)) * weight[..., None]).sum(1) / np.where(total > 0, total, 1)[..., None]
    assert merged.dtype == dtype and whole.dtype == jnp.float32
    close(merged, expected, dtype)
    with np.errstate(divide="ignore"):
        close(whole, np.log(total), "float32")
    assert not np.any(merged[1]) and np.all(whole[1] == -np.inf)
