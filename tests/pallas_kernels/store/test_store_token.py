"""Storing a token: every implementation against NumPy loops."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.store.store_token import STORE_TOKEN, pallas_triton, reference
from tests.pallas_kernels import cases

RUN = {
    "xla": reference.store_token,
    "interpreted": functools.partial(pallas_triton.store_token, interpret=True),
    "pallas_triton": pallas_triton.store_token,
} | cases.on_hopper(STORE_TOKEN)


def case(batch, heads, group, dim=16, slots=9, dtype="float32", rotating=True, seed=0):
    """Arguments; places include none, cursors include a full row."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    place = rng.integers(0, 120_000, batch)
    cursor = rng.integers(0, slots, batch)
    if batch > 2:
        place[1], cursor[2] = -1, slots
    arrays = {
        "cache_key": normal(batch, heads, slots, dim),
        "cache_value": normal(batch, heads, slots, dim),
        "cache_position": jnp.asarray(rng.integers(-1, 9, (batch, heads, slots)), jnp.int32),
        "cursor": jnp.asarray(cursor, jnp.int32),
        "query": normal(batch, heads, group, dim) if rotating else None,
        "inv_freq": jnp.asarray(10.0 ** -np.arange(dim // 2), jnp.float32) if rotating else None,
    }
    return (normal(batch, heads, dim), normal(batch, heads, dim), jnp.asarray(place, jnp.int32)), arrays


def oracle(key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq):
    keys, values = (np.array(x, np.float64) for x in (cache_key, cache_value))
    positions, moved = np.array(cache_position), np.array(cursor)
    asked = None if query is None else np.zeros(query.shape)
    for row, at in enumerate(np.asarray(place)):
        if query is not None:
            asked[row] = cases.rotated(query[row][..., None, :], [at], inv_freq)[..., 0, :]
        if at < 0:
            continue
        moved[row] += 1
        slot = int(cursor[row])
        if slot >= keys.shape[2]:
            continue
        for head in range(keys.shape[1]):
            new = key[row, head]
            keys[row, head, slot] = new if query is None else cases.rotated(new[None], [at], inv_freq)[0]
            values[row, head, slot] = value[row, head]
            positions[row, head, slot] = at
    return keys, values, positions, moved, asked


CASES = {
    "rows, one without a token, one full": {"batch": 4, "heads": 2, "group": 3},
    "bfloat16": {"batch": 3, "heads": 2, "group": 4, "dtype": "bfloat16"},
    "rows enough for a late warp": {"batch": 16, "heads": 8, "group": 4, "dim": 128, "slots": 64, "dtype": "bfloat16"},
    "not rotated": {"batch": 3, "heads": 3, "group": 1, "rotating": False},
}


@cases.every_body
@pytest.mark.parametrize("label", CASES)
def test_matches_a_loop_over_rows_and_heads(name, label):
    args, kwargs = case(**CASES[label])
    tolerance = 2e-2 if CASES[label].get("dtype") else 2e-6
    for got, want in zip(cases.compiled(RUN[name])(*args, **kwargs), oracle(*args, **kwargs), strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance, rtol=tolerance)


@cases.every_kernel
@pytest.mark.parametrize("full_keys", cases.one_shape(True, False))
def test_copies_of_an_offloaded_cache_do_as_well(name, full_keys):
    """Each array by its own number of rows: values may be few while keys are all there."""
    args, kwargs = case(4, 2, 4, slots=24)
    kwargs["cursor"] = jnp.asarray([1, 9, 24, 17], jnp.int32)
    whole = oracle(*args, **kwargs)
    copies = {x: cases.near(kwargs[x], kwargs["cursor"], 7) for x in ("cache_key", "cache_value")}
    copies = copies if not full_keys else {**copies, "cache_key": kwargs["cache_key"]}
    few = cases.compiled(RUN[name])(*args, **{**kwargs, **copies}, rows=cases.offloaded(kwargs["cursor"]))
    end = np.minimum(whole[3], 24)  # a full row stores nothing, though its cursor moves
    keys = whole[0] if full_keys else cases.near(whole[0], end, 7)
    cases.alike(few, (keys, cases.near(whole[1], end, 7), *whole[2:]), rtol=2e-6, atol=2e-6)
