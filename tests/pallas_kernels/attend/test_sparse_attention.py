"""`sparse_attention` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.sparse_attention import pallas_triton, reference
from tests.pallas_kernels import cases

RUN = cases.implementations("sparse_attention", config=pallas_triton.Config(tile=16))


def problem(seed, dtype="float32", rows=3, heads=2, group=2, dim=16, start=64, tokens=72, block=32, extra=9):
    """Arguments, and bool [B, H, G, T, S] of what each query sees; NaN in every token that is not real and behind it.

    The first query head of a group has a list for each block of queries, the others have one list and columns.
    """
    rng = np.random.default_rng(seed)
    slots, blocks = start + tokens + extra, -(-tokens // block)
    length = np.array([tokens, tokens - block // 2 - 1, 1])[:rows]
    query, key, value = (rng.normal(size=(rows, heads, *shape, dim)) for shape in ((group, tokens), (slots,), (slots,)))
    real = np.arange(tokens) < length[:, None]
    query = np.where(real[:, None, None, :, None], query, np.nan)
    stored = np.arange(slots) < start + length[:, None]
    key, value = (np.where(stored[:, None, :, None], x, np.nan) for x in (key, value))
    most = -(-slots // block)
    distances = np.full((rows, heads, group, blocks * most), 10**6)
    first, count = np.zeros((2, rows, heads, group, blocks), int)
    columns = np.full((rows, heads, group, 11), 10**6)
    num_columns = np.zeros((rows, heads, group), int)
    seen = np.zeros((rows, heads, group, tokens, slots), bool)
    token, slot = np.arange(tokens)[:, None] + start, np.arange(slots)[None]
    back = token // block - slot // block
    for b, h, g in np.ndindex(rows, heads, group):
        if g:
            some = np.flatnonzero(rng.random(start // block + blocks) < 0.4)
            some = some[some > 0]
            distances[b, h, g, : len(some)] = some
            count[b, h, g] = [(some <= start // block + n).sum() for n in range(blocks)]
            num_columns[b, h, g] = rng.integers(0, 10)
            mine = np.sort(rng.choice(start + tokens, num_columns[b, h, g], replace=False))
            columns[b, h, g, : len(mine)] = mine
            seen[b, h, g] = np.isin(back, some) | (np.isin(slot, mine) & (back > 0))
        else:
            for n in range(blocks):
                some = rng.permutation(np.arange(1, start // block + n + 1))[: rng.integers(0, 4)]
                first[b, h, g, n], count[b, h, g, n] = n * most, len(some)
                distances[b, h, g, n * most :][: len(some)] = some
                seen[b, h, g] |= np.isin(back, some) & (token // block == start // block + n)
    seen = (seen | (back == 0)) & (slot <= token)
    lists = {"distances": distances, "first": first, "count": count, "columns": columns, "num_columns": num_columns}
    lists = {name: jnp.asarray(x, jnp.int32) for name, x in lists.items()}
    seen = seen & real[:, None, None, :, None]
    more = {**lists, "start": jnp.int32(start), "length": jnp.asarray(length, jnp.int32)}
    return tuple(jnp.asarray(x, dtype) for x in (query, key, value)), more, seen


def expected(query, key, value, seen):
    query, key, value = (np.nan_to_num(np.asarray(x.astype(jnp.float32), np.float64)) for x in (query, key, value))
    return cases.softmax_attention(query, key[:, :, None], value[:, :, None], seen)[:2]


@cases.in_dtypes(cases.every_kernel)
@pytest.mark.parametrize(
    ("start", "tokens", "block"),
    [
        (64, 72, 32),
        pytest.param(0, 40, 16, marks=cases.thorough),
        pytest.param(0, 15, 16, marks=cases.thorough),
        pytest.param(128, 64, 64, marks=cases.thorough),
    ],
)
def test_what_is_listed_is_attended(name, dtype, start, tokens, block):
    """Also where start is a Python number, and where a row has one real token."""
    args, more, seen = problem(tokens, dtype, start=start, tokens=tokens, block=block)
    run = cases.compiled(RUN[name], block=block, scale=cases.SCALE)
    out, lse = run(*args, **more)
    assert out.dtype == dtype and out.shape == args[0].shape and lse.dtype == jnp.float32
    want, want_lse = expected(*args, seen)
    cases.close(out, want, dtype)
    real = seen.any(-1)
    np.testing.assert_allclose(np.asarray(lse)[real], want_lse[real], atol=2e-5 if dtype == "float32" else 2e-2)
    assert (np.asarray(lse)[~real] == -np.inf).all()


def test_the_memory_of_plain_jax_does_not_grow_with_the_square_of_the_tokens():
    """Of 64K tokens, the logits alone would have 16 GiB."""
    tokens, block = 1 << 16, 64
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    query, key = (jax.ShapeDtypeStruct((1, 1, *x, tokens, 16), jnp.bfloat16) for x in ((1,), ()))
    lists = {"distances": 1024, "first": 1024, "count": 1024, "columns": 1000}
    more = {name: shape((1, 1, 1, size)) for name, size in lists.items()} | {"num_columns": shape((1, 1, 1))}
    run = jax.jit(functools.partial(reference.sparse_attention, block=block, scale=cases.SCALE))
    program = run.lower(query, key, key, **more, start=shape(()), length=shape((1,)))
    shapes = [x for line in program.as_text().splitlines() for x in _sizes(line)]
    assert max(shapes) <= 1 << 20


def _sizes(line):
    """Elements of the arrays that a line of a program names."""
    return [math.prod(int(n) for n in x.split("x")[:-1]) for x in re.findall(r"tensor<((?:\d+x)+\w+)>", line)]
