"""`store_partial` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.cases import TOLERANCE, alike, compiled, every_body_and_dtype, implementations, thorough

STORE = implementations("store_partial")
CURSOR = (5, 22, 0, 23, 9)  # a full row whose token was stored, an empty one, one that could not store its token


def problem(seed, dim=16, channels=5, slots=22, dtype="float32"):
    """Keys that are NaN but for the newest ones; partial keys hold anything; two rows have no token."""
    rng = np.random.default_rng(seed)
    cursor = np.asarray(CURSOR, np.int32)
    newest = np.arange(slots) == cursor[:, None] - 1
    held = np.broadcast_to(np.arange(slots) < cursor[:, None, None], (len(CURSOR), 2, slots)).copy()
    held[4, 1] = False  # a head without the newest token
    key = np.where(newest[:, None, :, None], rng.normal(size=(*held.shape, dim)), np.nan)
    matrix, partial = (rng.normal(size=(len(CURSOR), 2, *x)) for x in ((dim, channels), (channels, slots + 3)))
    position = jnp.asarray(np.where(held, np.arange(slots), -1), jnp.int32)
    queries = rng.normal(size=(2, len(CURSOR), 2, 3, dim))
    key, query, partial, last = (jnp.asarray(x, dtype) for x in (key, queries[0], partial, queries[1]))
    place = jnp.asarray([7, -1, -1, 30, 8], jnp.int32)
    return key, position, jnp.asarray(cursor), jnp.asarray(matrix, jnp.float32), query, place, partial, last


def oracle(key, position, cursor, matrix, query, place, partial, last):
    """Float64 partial keys, and the last queries."""
    want = np.asarray(partial.astype(jnp.float32), np.float64)
    for b, h in np.ndindex(*key.shape[:2]):
        slot = int(cursor[b]) - 1
        if 0 <= slot < key.shape[2] and position[b, h, slot] >= 0:
            want[b, h, :, slot] = np.asarray(key[b, h, slot].astype(jnp.float32), np.float64) @ np.float64(matrix[b, h])
    return want, np.where(np.asarray(place)[:, None, None, None] >= 0, query, last)


@every_body_and_dtype
@pytest.mark.parametrize(("dim", "channels"), [(16, 5), pytest.param(128, 25, marks=thorough)])
def test_the_newest_key_is_stored_and_no_other(name, dtype, dim, channels):
    args = problem(1, dim, channels, dtype=dtype)
    run, (want, last) = compiled(STORE[name]), oracle(*args)
    got = run(*args)
    changed = want != np.asarray(args[6], np.float64)
    assert got[0].dtype == got[1].dtype == dtype and np.sum(changed) == 5 * channels
    np.testing.assert_allclose(np.float64(got[0]), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    np.testing.assert_array_equal(np.asarray(got[0])[~changed], np.asarray(args[6])[~changed])
    np.testing.assert_array_equal(got[1], last)
    alike(got, run(*args[:6], *got))
