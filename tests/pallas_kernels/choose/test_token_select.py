"""The operations around TokenSelect's vote: every implementation against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.tokenselect.token_list import TOKEN_LIST
from pallas_kernels.query.tokenselect.chunk_query import CHUNK_QUERY
from pallas_kernels.query.tokenselect.rotated_rows import ROTATED_ROWS
from pallas_kernels.query.tokenselect.step_query import STEP_QUERY
from tests.pallas_kernels.cases import MOSAIC, every_body, every_body_and_dtype, one_shape, rotated

INV_FREQ = (1 / 50 ** (np.arange(8) / 8)).astype(np.float32)
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.02}


BODIES = {"xla": "xla", "interpreted": "pallas_triton", "pallas_triton": "pallas_triton", MOSAIC: MOSAIC}


def run(name, operation, *args, **static):
    """One implementation of an operation, jitted over its arrays; a GPU's kernel runs interpreted where it is asked for."""
    if BODIES[name] not in operation.implementations:
        pytest.skip(f"{operation.name} has no {name}")
    entry = operation.implementations[BODIES[name]]
    body = functools.partial(entry.run, interpret=True) if name == "interpreted" else entry.run
    return jax.jit(functools.partial(body, **static))(*map(jnp.asarray, args))


@every_body_and_dtype
@pytest.mark.parametrize(("heads", "group"), one_shape((3, 2), (2, 4), (3, 1)))
def test_step_query_says_which_rows_select_and_rotates_for_both_uses(name, heads, group, dtype):
    """Rows that miss, hit, were never selected for, are short, and stand still."""
    rng = np.random.default_rng(5)
    query = jnp.asarray(rng.normal(size=(5, heads, group, 16)), dtype)
    last = np.asarray(query, np.float32) * np.array([-1, 2, 2, -1, -1], np.float32)[:, None, None, None]
    ready = np.array([True, True, False, True, True])
    hits, refreshes = np.arange(5, dtype=np.int32), np.arange(5, 10, dtype=np.int32)
    cursor = np.array([40, 15, 40, 14, 40], np.int32)  # rows of up to 2 + 4 + 8 tokens attend to all
    position = np.array([39, 14, 39, 13, -1], np.int32)
    knobs = np.int32(4), np.float32(0.9), INV_FREQ
    state = last, ready, hits, refreshes, cursor, position
    got = run(name, STEP_QUERY, query, *state, *knobs, num_sink=2, num_local=8)
    miss = np.array([True, False, True, False, False])
    np.testing.assert_array_equal(got.miss, miss)
    np.testing.assert_array_equal(got.ready, [True] * 5)
    np.testing.assert_array_equal(got.hits, hits + [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(got.refreshes, refreshes + miss)
    np.testing.assert_array_equal(got.stop, [32, 0, 32, 0, 0])
    np.testing.assert_array_equal(got.wanted, [4, 0, 4, 0, 0])
    now = np.asarray(query, np.float32)
    np.testing.assert_array_equal(got.last, np.where(miss[:, None, None, None], now, last))
    np.testing.assert_allclose(got.mean, rotated(now[..., None, :], [8], INV_FREQ)[..., 0, :], atol=1e-5)
    assert got.rotated.dtype == dtype and got.mean.dtype == jnp.float32
    # Told the products of all heads, one head decides as they do, whatever its own query.
    products = np.stack([(x * y).sum(axis=(1, 2, 3)) for x, y in ((now, now), (last, last), (now, last))], axis=1)
    one = run(name, STEP_QUERY, -query[:, :1], last[:, :1], *state[1:], *knobs, products, num_sink=2, num_local=8)
    np.testing.assert_array_equal(one.miss, miss)
    for row in range(5):
        want = rotated(now[row][..., None, :], [min(cursor[row], 14) - 1], INV_FREQ)[..., 0, :]
        np.testing.assert_allclose(np.asarray(got.rotated[row], np.float64), want, atol=TOLERANCE[dtype])


@every_body_and_dtype
@pytest.mark.parametrize("tokens", [45, pytest.param(2, marks=pytest.mark.thorough)])
def test_chunk_query_rotates_every_token_and_averages_the_real_ones(name, tokens, dtype):
    query = jnp.asarray(np.random.default_rng(6).normal(size=(3, 2, 3, tokens, 16)), dtype)
    real, first = np.array([tokens, 1, 0], np.int32), np.array([0, 9, 30], np.int32)
    mean, asked = run(name, CHUNK_QUERY, query, real, first, INV_FREQ, num_local=8)
    now, order = np.asarray(query, np.float64), np.arange(tokens)
    assert asked.dtype == dtype and mean.dtype == jnp.float32
    for row in range(3):
        scored = rotated(now[row], 8 + order, INV_FREQ)[..., : real[row], :].sum(axis=2) / max(real[row], 1)
        np.testing.assert_allclose(mean[row], scored, atol=1e-5)
        want = rotated(now[row], first[row] + order, INV_FREQ)
        np.testing.assert_allclose(np.asarray(asked[row], np.float64), want, atol=TOLERANCE[dtype])


@every_body
@pytest.mark.parametrize("keep", [True, False])
def test_token_list_has_no_gap(name, keep):
    """Sinks, chosen and newest tokens; rows that are long, at the limit, short, empty and asleep."""
    for budget in (4, 6):
        rng = np.random.default_rng(7)
        fresh, chosen = (np.sort(rng.choice(np.arange(2, 100), (5, 6)), axis=1).astype(np.int32) for _ in range(2))
        length = np.array([300, 2 + budget + 150, 20, 0, 300], np.int32)
        awake, miss = np.array([5, 0, 3, 0, -1], np.int32), np.array([True, False, False, True, False])
        args = fresh, length, awake, np.int32(budget), *((miss, chosen) if keep else ())
        now, token, used = run(name, TOKEN_LIST, *args, num_sink=2, num_local=150, extra=3)
        if keep:
            fresh = np.where(miss[:, None], fresh, chosen)
        np.testing.assert_array_equal(now, fresh)
        assert token.shape == used.shape == (5, 2 + 6 + 150 + 3) and used.dtype == bool
        for row, size in enumerate(length):
            want = [0, 1, *fresh[row, :budget], *range(size - 150, size)] if size > 152 + budget else [*range(size)]
            want = want if awake[row] >= 0 else []
            assert np.flatnonzero(used[row]).tolist() == [*range(len(want))]
            assert np.asarray(token[row]).tolist() == want + [0] * (token.shape[1] - len(want))


@every_body_and_dtype
def test_rotated_rows_are_the_listed_ones(name, dtype):
    rng = np.random.default_rng(8)
    key, value = (jnp.asarray(rng.normal(size=(2, 3, 50, 16)), dtype) for _ in range(2))
    token = rng.integers(0, 50, (2, 37)).astype(np.int32)
    got = run(name, ROTATED_ROWS, key, value, token, INV_FREQ)
    assert got[0].dtype == got[1].dtype == dtype
    for row in range(2):
        want = rotated(np.asarray(key, np.float64)[row][:, token[row]], np.arange(37), INV_FREQ)
        np.testing.assert_allclose(np.asarray(got[0][row], np.float64), want, atol=TOLERANCE[dtype])
        np.testing.assert_array_equal(got[1][row], value[row][:, token[row]])
