"""`merge_splits` against float64 NumPy, on every implementation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.merge_splits import MERGE_SPLITS, merge_splits
from pallas_kernels.attend.merge_splits import pallas_triton as merge_kernel
from tests.pallas_kernels.cases import close, compiled, every_body, mapped, one_shape

MERGE = {
    "xla": functools.partial(merge_splits, implementation="xla"),
    "interpreted": lambda out, lse, dtype=jnp.float32: merge_kernel.merge_splits(out, lse, dtype=dtype, interpret=True),
    "pallas_triton": functools.partial(merge_splits, implementation="pallas_triton"),
}


def partials(seed, parts, dim=64, lists=3, group=3):
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(lists, parts, group, dim)).astype(np.float32)
    lse = 3 * rng.normal(size=out.shape[:3]).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[1] = -np.inf
    out[lse == -np.inf] = np.nan
    return jnp.asarray(out), jnp.asarray(lse)


@every_body
@pytest.mark.parametrize(("parts", "dim"), one_shape((5, 80), (1, 64), (49, 128)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


@every_body
def test_a_mapped_call_equals_calls_one_by_one(name):
    out, lse = (jnp.stack(x) for x in zip(partials(1, 5, 80), partials(2, 5, 80)))
    for i, (merged, whole) in enumerate(zip(*mapped(MERGE[name])(out, lse))):
        for a, b in zip(compiled(MERGE[name], dtype="float32")(out[i], lse[i]), (merged, whole)):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_more_parts_than_a_program_holds_take_the_plain_way():
    out = jax.ShapeDtypeStruct((1, 2000, 1, 64), "float32")
    lse = jax.ShapeDtypeStruct((1, 2000, 1), "float32")
    assert MERGE_SPLITS.resolve(out, lse, dtype=jnp.float32, platform="gpu") == "xla"
