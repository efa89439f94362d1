"""A prompt chunk over the slots before it, against float64 NumPy; cuDNN's part where there is a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.past_attention import PAST_ATTENTION, past_attention
from tests.pallas_kernels.cases import NEEDS_GPU

CASES = [("xla", "float32"), ("xla", "bfloat16"), pytest.param("cudnn", "bfloat16", marks=NEEDS_GPU)]
SCALE = 0.2


def random(dtype, rows=3, heads=2, group=3, tokens=16, slots=100, dim=32):
    rng = np.random.default_rng(0)
    shapes = (rows, heads, group, tokens, dim), (rows, heads, slots, dim), (rows, heads, slots, dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_queries_see_the_first_slots_of_their_row(name, dtype):
    query, key, value = random(dtype)
    count = jnp.asarray([100, 37, 0], jnp.int32)
    out, lse = jax.jit(functools.partial(past_attention, scale=SCALE, implementation=name))(query, key, value, count=count)
    assert not out[2].any() and (lse[2] == -jnp.inf).all()
    queries, keys, values, got, total = (np.asarray(x, np.float64) for x in (query, key, value, out, lse))
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    for row, seen in ((0, 100), (1, 37)):
        weight = np.exp(SCALE * np.einsum("hgtd,hsd->hgts", queries[row], keys[row, :, :seen]))
        want = np.einsum("hgts,hsd->hgtd", weight, values[row, :, :seen]) / weight.sum(-1)[..., None]
        np.testing.assert_allclose(got[row], want, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(total[row], np.log(weight.sum(-1)), rtol=tolerance, atol=tolerance)


def test_gpu_takes_cudnn_where_it_can():
    options = {"count": jnp.zeros(3, jnp.int32), "scale": SCALE}
    assert PAST_ATTENTION.resolve(*random("bfloat16"), platform="gpu", **options) == "cudnn"
    assert PAST_ATTENTION.resolve(*random("float32"), platform="gpu", **options) == "xla"
    assert PAST_ATTENTION.resolve(*random("bfloat16"), platform="cpu", **options) == "xla"
