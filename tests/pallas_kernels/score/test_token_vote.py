"""TokenSelect's vote: every implementation against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._mosaic_gpu import exact_products
from pallas_kernels.score.tokenselect.token_vote import pallas_triton, token_vote
from tests.pallas_kernels.cases import compiled, every_body, implementations, on_hopper, one_shape
from tests.pallas_kernels.warp import Number, Warp

CONFIG = pallas_triton.Config(block=16, splits=2, merge_block=32)  # several steps, splits and merges in 101 tokens

VOTE = implementations("token_vote", config=CONFIG) | on_hopper(token_vote)


def rows(seed, heads=2, group=4, dim=16, tokens=101, dtype="float32", bounds=((5, 77), (33, 101), (0, 16), (7, 7))):
    """Random query and keys, the keys outside each row's bounds NaN."""
    rng = np.random.default_rng(seed)
    start, stop = np.array(bounds, np.int32).T
    query = rng.normal(size=(len(bounds), heads, group, dim)).astype(np.float32)
    key = rng.normal(size=(len(bounds), heads, tokens, dim)).astype(np.float32)
    place = np.arange(tokens)
    key[~((place >= start[:, None]) & (place < stop[:, None]))[:, None].repeat(heads, 1)] = np.nan
    return jnp.asarray(query), jnp.asarray(key, dtype), jnp.asarray(start), jnp.asarray(stop)


def oracle(query, key, start, stop):
    """Votes [B, S] in float64."""
    query, key = np.asarray(query, np.float64), np.asarray(key.astype(jnp.float32), np.float64)
    out = np.full((len(key), key.shape[2]), -np.inf)
    for row, (first, end) in enumerate(zip(start, np.minimum(stop, key.shape[2]), strict=True)):
        if end > first:
            logits = np.einsum("hgd,hsd->hgs", query[row], key[row, :, first:end])
            weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
            out[row, first:end] = (weight / weight.sum(axis=-1, keepdims=True)).sum(axis=(0, 1))
    return out


@every_body
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "group", "dim"), one_shape((2, 3, 32), (1, 7, 64), (2, 4, 128), (2, 2, 16)))
def test_votes_equal_float64(name, dtype, heads, group, dim):
    query, key, start, stop = rows(group, heads, group, dim, dtype=dtype)
    run = compiled(VOTE[name])
    vote = run(query, key, start=start, stop=stop)
    assert vote.dtype == jnp.float32 and vote.shape == (4, 101)
    want = oracle(query, key, start, stop)
    # As close with bfloat16 keys as with float32 ones: the query is not rounded to bfloat16.
    np.testing.assert_allclose(vote, want, rtol=5e-5, atol=1e-9)
    np.testing.assert_array_equal(np.isneginf(vote), np.isneginf(want))
    np.testing.assert_allclose(np.where(want > -np.inf, vote, 0).sum(axis=1), [heads * group] * 3 + [0], rtol=1e-5)
    np.testing.assert_array_equal(vote, run(query, key, start=start, stop=stop))


@every_body
def test_bounds_that_are_one_number_past_the_end_or_empty(name):
    """A start that is one number, ends beyond the cache, and rows without a candidate."""
    query, key, _, _ = rows(1, bounds=((9, 101),) * 4)
    run = jax.jit(VOTE[name], static_argnames="start")
    start, stop = np.full(4, 9, np.int32), np.array([40, 101, 1000, 10], np.int32)
    np.testing.assert_allclose(run(query, key, start=9, stop=stop), oracle(query, key, start, stop), rtol=5e-5)
    none = jnp.array([0, 9, -3, 8], jnp.int32)
    assert np.isneginf(run(query, key, start=9, stop=none)).all()
    tiny = run(query[:1, :, :, :], key[:1, :, 9:12], start=1, stop=jnp.array([2], jnp.int32))
    np.testing.assert_allclose(tiny, [[-np.inf, 8, -np.inf]], rtol=1e-6)


@every_body
def test_large_logits_and_one_loud_head(name):
    """Softmax per head: neither overflow nor a head whose logits are large takes over."""
    query, key, start, stop = rows(2, group=3)
    query = query.at[:, 0].multiply(300)
    vote = compiled(VOTE[name])(query, key, start=start, stop=stop)
    np.testing.assert_allclose(vote, oracle(query, key, start, stop), rtol=2e-3, atol=1e-7)


def test_parts_of_a_query_lose_nothing(monkeypatch):
    for name in "tw":
        monkeypatch.setattr(exact_products, name, Warp(0))
    rng = np.random.default_rng(0)
    numbers = np.tile(np.float32(rng.normal(size=(2, 16)) * 10.0 ** rng.integers(-3, 3, (2, 16))), 2)  # of lanes 16 apart
    found = [Warp.parted(x, "bfloat16") for x in exact_products.bfloat16_parts([Number(x) for x in numbers])]
    total = sum(np.float64([x.each for x in parts]) for parts in found)
    np.testing.assert_array_equal(total[:, :16] + total[:, 16:], numbers[:, :16])
