"""A chunk of a prompt over what came before it, and over the slots of a cache, against float64 NumPy; cuDNN on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.attend.prefix_attention import prefix_attention
from tests.pallas_kernels.cases import NEEDS_GPU, SCALE, close, softmax_attention

TOKENS, SLOTS = 16, 100
every_case = pytest.mark.parametrize(
    ("name", "dtype"), [("xla", "float32"), ("xla", "bfloat16"), pytest.param("cudnn", "bfloat16", marks=NEEDS_GPU)]
)


def chunk(rows, heads=2, group=3, dim=32):
    """Random queries of a chunk, and keys and values."""
    rng = np.random.default_rng(0)
    shapes = (rows, heads, group, TOKENS, dim), (rows, heads, SLOTS, dim), (rows, heads, SLOTS, dim)
    return [rng.normal(size=shape) for shape in shapes]


def expected(query, key, value, seen):
    return softmax_attention(query, key[:, :, None], value[:, :, None], seen)[:2]


@every_case
def test_queries_see_the_first_slots_of_their_row(name, dtype):
    arrays, count = [jnp.asarray(x, dtype) for x in chunk(3)], np.asarray([100, 37, 0], np.int32)
    run = jax.jit(functools.partial(past_attention, scale=SCALE, implementation=name))
    out, lse = run(*arrays, count=count)
    assert not out[2].any() and (lse[2] == -jnp.inf).all()
    close((out, lse), expected(*arrays, (np.arange(SLOTS) < count[:, None])[:, None, None, None]), dtype)


@every_case
@pytest.mark.parametrize(
    ("start", "length"),
    [(0, None), (jnp.int32(0), [16, 7]), (jnp.int32(84), None), (jnp.asarray([3, 95], jnp.int32), [16, 5])],
    ids=["whole prompt", "first chunk", "last chunk", "rows of their own"],
)
def test_token_t_sees_slots_up_to_its_own(name, dtype, start, length):
    query, key, value = chunk(2)
    real = np.full(2, TOKENS) if length is None else np.asarray(length)
    first = np.broadcast_to(np.asarray(start), (2,))
    for row in range(2):  # what follows the real tokens is not looked at
        for x in (key, value):
            x[row, :, first[row] + real[row] : first[row] + TOKENS] = np.nan
    arrays = [jnp.asarray(x, dtype) for x in (query, key, value)]
    run = functools.partial(prefix_attention, scale=SCALE, implementation=name)
    run = functools.partial(run, start=start) if isinstance(start, int) else run
    start = {} if isinstance(start, int) else {"start": start}
    length = None if length is None else jnp.asarray(length, jnp.int32)
    out, lse = jax.jit(run)(*arrays, length=length, **start)
    token = np.arange(TOKENS)
    seen = np.arange(SLOTS) <= (first[:, None] + token)[..., None]
    seen = (seen & (token < real[:, None])[..., None])[:, None, None]
    close((out, lse), expected(*arrays, seen), dtype)
    for row, end in enumerate(real):
        assert not out[row, :, :, end:].any() and (lse[row, :, :, end:] == -jnp.inf).all()
