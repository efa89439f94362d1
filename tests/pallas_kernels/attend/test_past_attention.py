"""A prompt chunk over the slots before it, against float64 NumPy; cuDNN's part where there is a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.past_attention import past_attention
from tests.pallas_kernels.cases import NEEDS_GPU, SCALE, close, softmax_attention

CASES = [("xla", "float32"), ("xla", "bfloat16"), pytest.param("cudnn", "bfloat16", marks=NEEDS_GPU)]


def chunk(dtype, rows, heads=2, group=3, tokens=16, slots=100, dim=32):
    """Random queries of a chunk, and keys and values."""
    rng = np.random.default_rng(0)
    shapes = (rows, heads, group, tokens, dim), (rows, heads, slots, dim), (rows, heads, slots, dim)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_queries_see_the_first_slots_of_their_row(name, dtype):
    query, key, value = chunk(dtype, 3)
    count = jnp.asarray([100, 37, 0], jnp.int32)
    run = jax.jit(functools.partial(past_attention, scale=SCALE, implementation=name))
    out, lse = run(query, key, value, count=count)
    assert not out[2].any() and (lse[2] == -jnp.inf).all()
    seen = (np.arange(100) < np.asarray(count)[:, None])[:, None, None, None]
    close((out, lse), softmax_attention(query, key[:, :, None], value[:, :, None], seen)[:2], dtype)
