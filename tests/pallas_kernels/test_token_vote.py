"""TokenSelect's vote and the small operations around it: every implementation against float64 NumPy."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunk_query import CHUNK_QUERY, chunk_query
from pallas_kernels.rotated_rows import ROTATED_ROWS, rotated_rows
from pallas_kernels.step_query import STEP_QUERY, step_query
from pallas_kernels.token_list import TOKEN_LIST, token_list
from pallas_kernels.token_vote import TOKEN_VOTE, pallas_triton, token_vote

ON_GPU = jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason=f"needs a GPU, got {jax.default_backend()}")
CONFIG = pallas_triton.Config(block=16, splits=2, merge_block=32)  # several steps, splits and merges in 101 tokens

VOTE = {
    "xla": functools.partial(token_vote, implementation="xla"),
    "interpreted": functools.partial(pallas_triton.token_vote, config=CONFIG, interpret=True),
    "pallas_triton": functools.partial(token_vote, implementation="pallas_triton"),
}
NAMES = ["xla", "interpreted", pytest.param("pallas_triton", marks=NEEDS_GPU)]
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


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


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 4, 16), (1, 1, 64), (3, 3, 32)])
def test_votes(name, dtype, heads, group, dim):
    query, key, start, stop = rows(group, heads, group, dim, dtype=dtype)
    run = jax.jit(VOTE[name])
    vote = run(query, key, start=start, stop=stop)
    assert vote.dtype == jnp.float32 and vote.shape == (4, 101)
    want = oracle(query, key, start, stop)
    # As close with bfloat16 keys as with float32 ones: the query is not rounded to bfloat16.
    np.testing.assert_allclose(vote, want, rtol=5e-5, atol=1e-9)
    np.testing.assert_array_equal(np.isneginf(vote), np.isneginf(want))
    np.testing.assert_allclose(np.where(want > -np.inf, vote, 0).sum(axis=1), [heads * group] * 3 + [0], rtol=1e-5)
    np.testing.assert_array_equal(vote, run(query, key, start=start, stop=stop))


@pytest.mark.parametrize("name", NAMES)
def test_bounds(name):
    """A start that is one number, ends beyond the cache, and rows without a candidate."""
    query, key, _, _ = rows(1, bounds=((9, 101),) * 4)
    run = jax.jit(VOTE[name], static_argnames="start")
    start, stop = np.full(4, 9, np.int32), np.array([40, 101, 1000, 10], np.int32)
    np.testing.assert_allclose(run(query, key, start=9, stop=stop), oracle(query, key, start, stop), rtol=5e-5)
    none = jnp.array([0, 9, -3, 8], jnp.int32)
    assert np.isneginf(run(query, key, start=9, stop=none)).all()
    tiny = VOTE[name](query[:1, :, :, :], key[:1, :, 9:12], start=1, stop=jnp.array([2], jnp.int32))
    np.testing.assert_allclose(tiny, [[-np.inf, 8, -np.inf]], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_large_logits_and_one_loud_head(name):
    """Softmax per head: neither overflow nor a head whose logits are large takes over."""
    query, key, start, stop = rows(2, dim=32)
    query = query.at[:, 0].multiply(300)
    vote = VOTE[name](query, key, start=start, stop=stop)
    np.testing.assert_allclose(vote, oracle(query, key, start, stop), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_vmap(name):
    sets = [rows(seed, bounds=bounds) for seed, bounds in ((1, ((5, 77),)), (2, ((0, 101),)))]
    stacked = [jnp.stack(x) for x in zip(*sets, strict=True)]
    together = jax.vmap(lambda q, k, a, b: VOTE[name](q, k, start=a, stop=b))(*stacked)
    for (query, key, start, stop), got in zip(sets, together, strict=True):
        np.testing.assert_allclose(got, VOTE[name](query, key, start=start, stop=stop), rtol=1e-6)


def test_bad_arguments_and_what_the_kernel_takes():
    query, key, start, stop = rows(3)
    with pytest.raises(ValueError, match="token_vote: got query"):
        token_vote(query[..., 1:], key, start=start, stop=stop)
    with pytest.raises(ValueError, match=r"got start int32 \(3,\), expected int32 \[B\] = \(4,\)"):
        token_vote(query, key, start=start[1:], stop=stop)
    with pytest.raises(ValueError, match=r"got stop float32 \(4,\), expected int32"):
        token_vote(query, key, start=0, stop=stop.astype(jnp.float32))
    for got in ({"block": 8}, {"splits": 3}, {"merge_block": 0}):
        with pytest.raises(ValueError, match="expected a power of two"):
            pallas_triton.Config(**got)
    with pytest.raises(NotImplementedError, match="got head_dim 24, expected a power of two from 16 to 256"):
        wide = jnp.zeros((4, 2, 4, 24)), jnp.zeros((4, 2, 5, 24))
        token_vote(*wide, start=0, stop=stop, implementation="pallas_triton", platform="gpu")
    with pytest.raises(NotImplementedError, match="got query float32 and key int8, expected"):
        token_vote(query, key.astype(jnp.int8), start=0, stop=stop, implementation="pallas_triton", platform="gpu")
    assert TOKEN_VOTE.resolve(query, key, start=0, stop=stop, platform="gpu") == "pallas_triton"
    assert TOKEN_VOTE.resolve(query, key, start=0, stop=stop, platform="tpu") == "xla"


def test_default_config_fills_the_gpu():
    assert pallas_triton.default_config(8, 131072).splits == 64
    assert pallas_triton.default_config(64, 131072).splits == 8
    assert pallas_triton.default_config(1, 100).splits == 2
    assert pallas_triton.default_config(1024, 131072).splits == 1


@NEEDS_GPU
def test_the_kernels_are_in_the_compiled_program():
    query, key, start, stop = rows(4, dtype="bfloat16")
    run = jax.jit(VOTE["pallas_triton"])
    assert "token_vote_score" in run.lower(query, key, start=start, stop=stop).compile().as_text()


# ---- around the vote ------------------------------------------------------------------------------------------------

INV_FREQ = (1 / 50 ** (np.arange(8) / 8)).astype(np.float32)


@pytest.fixture(params=NAMES)
def run(request, monkeypatch):
    """Calls an operation's public function with one implementation, the interpreter among them."""

    def call(operation, function, *args, **kwargs):
        if request.param != "interpreted":
            return function(*args, **kwargs, implementation=request.param)
        kernel = functools.partial(operation.implementations["pallas_triton"].run, interpret=True)
        entry = dataclasses.replace(operation.implementations["xla"], run=kernel)
        monkeypatch.setitem(operation.implementations, "xla", entry)
        return function(*args, **kwargs, implementation="xla")

    return call


def turn(x, place):
    """RoPE in float64 of x [..., T, D] at ``place`` [T]."""
    angle = np.asarray(place, np.float64)[:, None] * INV_FREQ
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@pytest.mark.parametrize(("heads", "group"), [(2, 4), (3, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_step_query(run, heads, group, dtype):
    """Rows that miss, hit, were never selected for, are short, and stand still."""
    rng = np.random.default_rng(5)
    query = jnp.asarray(rng.normal(size=(5, heads, group, 16)), dtype)
    last = np.asarray(query, np.float32) * np.array([-1, 2, 2, -1, -1], np.float32)[:, None, None, None]
    ready = np.array([True, True, False, True, True])
    hits, refreshes = np.arange(5, dtype=np.int32), np.arange(5, 10, dtype=np.int32)
    cursor = np.array([40, 15, 40, 14, 40], np.int32)  # dense up to 2 + 4 + 8
    position = np.array([39, 14, 39, 13, -1], np.int32)
    state = (jnp.asarray(x) for x in (last, ready, hits, refreshes, cursor, position))
    got = run(
        STEP_QUERY,
        step_query,
        query,
        *state,
        budget=jnp.int32(4),
        theta=0.9,
        inv_freq=INV_FREQ,
        num_sink=2,
        num_local=8,
    )
    miss = np.array([True, False, True, False, False])
    np.testing.assert_array_equal(got.miss, miss)
    np.testing.assert_array_equal(got.ready, [True] * 5)
    np.testing.assert_array_equal(got.hits, hits + [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(got.refreshes, refreshes + miss)
    np.testing.assert_array_equal(got.stop, [32, 0, 32, 0, 0])
    np.testing.assert_array_equal(got.wanted, [4, 0, 4, 0, 0])
    now = np.asarray(query, np.float32)
    np.testing.assert_array_equal(got.last, np.where(miss[:, None, None, None], now, last))
    np.testing.assert_allclose(got.mean, turn(now[..., None, :], [8])[..., 0, :], atol=1e-5)
    assert got.rotated.dtype == dtype and got.mean.dtype == jnp.float32
    for row in range(5):
        want = turn(now[row][..., None, :], [min(cursor[row], 14) - 1])[..., 0, :]
        np.testing.assert_allclose(
            np.asarray(got.rotated[row], np.float64), want, atol=1e-5 if dtype == "float32" else 0.02
        )


@pytest.mark.parametrize("tokens", [2, 32, 45])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chunk_query(run, tokens, dtype):
    query = jnp.asarray(np.random.default_rng(6).normal(size=(3, 2, 3, tokens, 16)), dtype)
    real, first = np.array([tokens, 1, 0], np.int32), np.array([0, 9, 30], np.int32)
    mean, turned = run(CHUNK_QUERY, chunk_query, query, jnp.asarray(real), jnp.asarray(first), INV_FREQ, num_local=8)
    now, order = np.asarray(query, np.float64), np.arange(tokens)
    assert turned.dtype == dtype and mean.dtype == jnp.float32
    for row in range(3):
        scored = turn(now[row], 8 + order)[..., : real[row], :].sum(axis=2) / max(real[row], 1)
        np.testing.assert_allclose(mean[row], scored, atol=1e-5)
        want = turn(now[row], first[row] + order)
        np.testing.assert_allclose(np.asarray(turned[row], np.float64), want, atol=1e-5 if dtype == "float32" else 0.02)


@pytest.mark.parametrize("budget", [4, 6])
@pytest.mark.parametrize("keep", [True, False])
def test_token_list(run, budget, keep):
    """Sinks, chosen and newest tokens without a gap; rows that are long, at the limit, short, empty and asleep."""
    rng = np.random.default_rng(7)
    fresh, chosen = (np.sort(rng.choice(np.arange(2, 100), (5, 6)), axis=1).astype(np.int32) for _ in range(2))
    length = np.array([300, 2 + budget + 150, 20, 0, 300], np.int32)
    awake, miss = np.array([5, 0, 3, 0, -1], np.int32), np.array([True, False, False, True, False])
    old = {"miss": jnp.asarray(miss), "chosen": jnp.asarray(chosen)} if keep else {}
    args = jnp.asarray(fresh), jnp.asarray(length), jnp.asarray(awake)
    now, token, used = run(
        TOKEN_LIST, token_list, *args, budget=jnp.int32(budget), num_sink=2, num_local=150, extra=3, **old
    )
    if keep:
        fresh = np.where(miss[:, None], fresh, chosen)
    np.testing.assert_array_equal(now, fresh)
    assert token.shape == used.shape == (5, 2 + 6 + 150 + 3) and used.dtype == bool
    for row, size in enumerate(length):
        want = [0, 1, *fresh[row, :budget], *range(size - 150, size)] if size > 152 + budget else [*range(size)]
        want = want if awake[row] >= 0 else []
        assert np.flatnonzero(used[row]).tolist() == [*range(len(want))]
        assert np.asarray(token[row]).tolist() == want + [0] * (token.shape[1] - len(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotated_rows(run, dtype):
    rng = np.random.default_rng(8)
    key, value = (jnp.asarray(rng.normal(size=(2, 3, 50, 16)), dtype) for _ in range(2))
    token = rng.integers(0, 50, (2, 37)).astype(np.int32)
    got = run(ROTATED_ROWS, rotated_rows, key, value, jnp.asarray(token), INV_FREQ)
    assert got[0].dtype == got[1].dtype == dtype
    for row in range(2):
        want = turn(np.asarray(key, np.float64)[row][:, token[row]], np.arange(37))
        close = 1e-5 if dtype == "float32" else 0.02
        np.testing.assert_allclose(np.asarray(got[0][row], np.float64), want, atol=close)
        np.testing.assert_array_equal(got[1][row], value[row][:, token[row]])


def test_a_list_needs_both_or_neither():
    one = jnp.zeros((1,), jnp.int32)
    with pytest.raises(ValueError, match="token_list: got miss None and chosen .* expected both or neither"):
        token_list(jnp.zeros((1, 4), jnp.int32), one, one, budget=4, num_sink=2, num_local=8, chosen=one[:, None])
