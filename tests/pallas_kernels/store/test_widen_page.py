"""`widen_page` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.cases import alike, compiled, every_body, implementations, near, offloaded

WIDEN = implementations("widen_page")


def stored(seed, cursor, slots=22, page_size=4, dtype="float32"):
    """Keys of 4 rows, NaN where nothing is stored, positions, cursors, and bounds of the pages before the newest key."""
    rng = np.random.default_rng(seed)
    cursor = np.array(cursor, np.int32)
    held = np.arange(slots) < cursor[:, None, None]
    held = np.broadcast_to(held, (len(cursor), 2, slots)).copy()
    held[-1, 1] = False  # a head without the newest token
    key = jnp.asarray(np.where(held[..., None], rng.normal(size=(len(cursor), 2, slots, 16)), np.nan), dtype)
    position = jnp.asarray(np.where(held, np.arange(slots), -1), jnp.int32)

    def bounds(last):
        pages = -(-slots // page_size)
        old = np.asarray(key.astype(jnp.float32))[..., :slots, :]
        old = np.where((np.arange(slots) < last[:, None, None])[..., None], old, np.nan)
        old = np.pad(old, ((0, 0), (0, 0), (0, pages * page_size - slots), (0, 0)), constant_values=np.nan)
        old = old.reshape(len(cursor), 2, pages, page_size, 16)
        low, high = (f.reduce(old, axis=3) for f in (np.fmin, np.fmax))  # NaN for a page without a token
        return jnp.asarray(np.nan_to_num(low, nan=np.inf), dtype), jnp.asarray(np.nan_to_num(high, nan=-np.inf), dtype)

    return key, position, jnp.asarray(cursor), bounds(cursor - 1), bounds(cursor)


@every_body
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cursor", [(1, 4, 0, 9), (5, 22, 21, 8), (20, 13, 12, 17)])
def test_bounds_take_the_newest_key_in(name, dtype, cursor):
    key, position, cursor, before, after = stored(1, cursor, dtype=dtype)
    run = compiled(WIDEN[name], page_size=4)
    once = run(key, position, cursor, *before)
    for got, want, twice in zip(once, after, run(key, position, cursor, *once)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
        np.testing.assert_array_equal(got.astype(jnp.float32), twice.astype(jnp.float32))
    past = run(key, position, jnp.full_like(cursor, 23), *before)  # a full row stores nothing
    np.testing.assert_array_equal(past[0].astype(jnp.float32), before[0].astype(jnp.float32))


@every_body
def test_a_mapped_call_equals_calls_one_by_one(name):
    sets = [stored(seed, (5, 9)) for seed in (1, 2)]
    args = [(key, position, cursor, *before) for key, position, cursor, before, _ in sets]
    together = jax.jit(jax.vmap(compiled(WIDEN[name], page_size=4)))(*(jnp.stack(x) for x in zip(*args)))
    for at, (*_, after) in enumerate(sets):
        for got, want in zip(together, after):
            np.testing.assert_array_equal(got[at], want)


@every_body
@pytest.mark.parametrize("cursor", [(1, 4, 0, 9), (5, 22, 21, 8)])
def test_copies_of_an_offloaded_cache_do_as_well(name, cursor):
    key, position, cursor, before, after = stored(1, cursor)
    run = compiled(WIDEN[name], page_size=4)
    alike(run(near(key, cursor, 6), position, cursor, *before, rows=offloaded(cursor)), after)
