"""`widen_page` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.store.quest.widen_page import widen_page
from tests.pallas_kernels.cases import compiled, every_body_and_dtype, implementations, on_hopper

WIDEN = implementations("widen_page") | on_hopper(widen_page)


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


@every_body_and_dtype
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
