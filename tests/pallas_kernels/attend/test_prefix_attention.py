"""A chunk of a prompt over what came before it, against float64 NumPy; cuDNN's part where there is a GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.prefix_attention import prefix_attention
from tests.pallas_kernels.attend.test_past_attention import chunk
from tests.pallas_kernels.cases import NEEDS_GPU, SCALE, close, softmax_attention

CASES = [("xla", "float32"), ("xla", "bfloat16"), pytest.param("cudnn", "bfloat16", marks=NEEDS_GPU)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize(
    ("start", "length"),
    [(0, None), (jnp.int32(0), [16, 7]), (jnp.int32(84), None), (jnp.asarray([3, 95], jnp.int32), [16, 5])],
    ids=["whole prompt", "first chunk", "last chunk", "rows of their own"],
)
def test_token_t_sees_slots_up_to_its_own(name, dtype, start, length):
    query, key, value = chunk(dtype, 2)
    real = np.full(2, 16) if length is None else np.asarray(length)
    first = np.broadcast_to(np.asarray(start), (2,))
    for row in range(2):  # what follows the real tokens is not looked at
        key, value = (x.at[row, :, first[row] + real[row] : first[row] + 16].set(jnp.nan) for x in (key, value))
    run = functools.partial(prefix_attention, scale=SCALE, implementation=name)
    run = functools.partial(run, start=start) if isinstance(start, int) else run
    start = {} if isinstance(start, int) else {"start": start}
    length = None if length is None else jnp.asarray(length, jnp.int32)
    out, lse = jax.jit(run)(query, key, value, length=length, **start)
    token = np.arange(16)
    seen = np.arange(100) <= (first[:, None] + token)[..., None]
    seen = (seen & (token < real[:, None])[..., None])[:, None, None]
    close((out, lse), softmax_attention(query, key[:, :, None], value[:, :, None], seen)[:2], dtype)
    for row, end in enumerate(real):
        assert not out[row, :, :, end:].any() and (lse[row, :, :, end:] == -jnp.inf).all()
