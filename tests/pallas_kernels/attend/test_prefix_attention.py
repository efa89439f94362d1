"""A chunk of a prompt over what came before it, against float64 NumPy; cuDNN's part where there is a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.prefix_attention import PREFIX_ATTENTION, prefix_attention
from pallas_kernels.machine import assume_machine
from tests.pallas_kernels.cases import NEEDS_GPU

CASES = [("xla", "float32"), ("xla", "bfloat16"), pytest.param("cudnn", "bfloat16", marks=NEEDS_GPU)]
SCALE = 0.2


def random(dtype, rows=2, heads=2, group=3, tokens=16, slots=100, dim=32):
    rng = np.random.default_rng(0)
    shapes = (rows, heads, group, tokens, dim), (rows, heads, slots, dim), (rows, heads, slots, dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize(
    ("start", "length"),
    [(0, None), (jnp.int32(0), [16, 7]), (jnp.int32(84), None), (jnp.asarray([3, 95], jnp.int32), [16, 5])],
    ids=["whole prompt", "first chunk", "last chunk", "rows of their own"],
)
def test_token_t_sees_slots_up_to_its_own(name, dtype, start, length):
    query, key, value = random(dtype)
    real = np.full(2, 16) if length is None else np.asarray(length)
    first = np.broadcast_to(np.asarray(start), (2,))
    for row in range(2):  # what follows the real tokens is not looked at
        key, value = (x.at[row, :, first[row] + real[row] : first[row] + 16].set(jnp.nan) for x in (key, value))
    given = None if length is None else jnp.asarray(length, jnp.int32)
    run = functools.partial(prefix_attention, scale=SCALE, implementation=name)
    run = functools.partial(run, start=start) if isinstance(start, int) else run
    start = {} if isinstance(start, int) else {"start": start}
    out, lse = jax.jit(run)(query, key, value, length=given, **start)
    tolerance = 2e-5 if dtype == "float32" else 2e-2
    queries, keys, values = (np.asarray(x, np.float64) for x in (query, key, value))
    for row in range(2):
        for token in range(16):
            if token >= real[row]:
                assert not out[row, :, :, token].any() and (lse[row, :, :, token] == -jnp.inf).all()
                continue
            seen = slice(0, first[row] + token + 1)
            weight = np.exp(SCALE * np.einsum("hgd,hsd->hgs", queries[row, :, :, token], keys[row, :, seen]))
            total = weight.sum(-1)
            want = np.einsum("hgs,hsd->hgd", weight, values[row, :, seen]) / total[..., None]
            close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
            close(np.asarray(out[row, :, :, token], np.float64), want)
            close(np.asarray(lse[row, :, :, token], np.float64), np.log(total))


def test_gpu_takes_cudnn_where_it_can():
    arrays = random("bfloat16")
    options = {"start": 0, "length": None, "scale": SCALE}
    assert PREFIX_ATTENTION.resolve(*arrays, platform="gpu", **options) == "cudnn"
    assert PREFIX_ATTENTION.resolve(*random("float32"), platform="gpu", **options) == "xla"
    with assume_machine("gpu", (9, 0)):
        assert PREFIX_ATTENTION.resolve(*arrays, **options) == "cudnn"
        assert PREFIX_ATTENTION.resolve(*arrays, platform="cpu", **options) == "xla"
    assert PREFIX_ATTENTION.resolve(*arrays, platform="cpu", **options) == "xla"


def test_wrong_shapes_are_refused():
    query, key, value = random("float32")
    with pytest.raises(ValueError, match="key"):
        prefix_attention(query, key[:, :, :8], value[:, :, :8], start=0, scale=SCALE)
