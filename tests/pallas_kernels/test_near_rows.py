"""Kernels that store or read the newest token where a cache keeps only some rows on the device: as with all of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.host import Rows, copy_row, has_copy, put_rows, take_rows, take_window, to_device, to_host
from pallas_kernels.store_codes import pallas_triton as pallas_store
from pallas_kernels.store_codes import store_codes
from tests.pallas_kernels.test_encode import BUFFER, LOCAL, signs_of
from tests.pallas_kernels.test_page_score import WIDEN, stored
from tests.pallas_kernels.test_sentence_cut import ADD, book
from tests.pallas_kernels.test_store_token import NAMES, RUN, case

SINKS = 2


def near(x, cursor, rows):
    """The rows of x [B, H, S, D] that are kept near; NaN where none belongs."""
    kept = np.full((*x.shape[:2], rows, x.shape[3]), np.nan, np.float32)
    for b, end in enumerate(np.asarray(cursor)):
        for slot in range(min(int(end), x.shape[2])):
            if bool(has_copy(jnp.int32(slot), jnp.int32(end), SINKS, rows)):
                kept[b, :, int(copy_row(jnp.int32(slot), SINKS, rows))] = x[b, :, slot].astype(jnp.float32)
    return jnp.asarray(kept, x.dtype)


def offloaded(cursor):
    """What these operations are told of an offloaded cache; they read nothing of what is in host memory."""
    return Rows(host=jnp.zeros((len(cursor), 1, 1, 1)), newest=cursor, sinks=SINKS)


def test_rows_kept_near():
    """Sinks, then a ring in which the newest of equal remainder stays."""
    held = [s for s in range(20) if bool(has_copy(jnp.int32(s), jnp.int32(11), SINKS, 6))]
    assert held == [0, 1, *range(7, 20)]
    assert [int(copy_row(jnp.int32(s), SINKS, 6)) for s in range(11)] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("full_keys", [False, True])
def test_store_token(name, full_keys):
    """Each array by its own number of rows: values may be few while keys are all there."""
    args, kwargs = case(4, 2, 4, slots=24)
    kwargs["cursor"] = jnp.asarray([1, 9, 24, 17], jnp.int32)
    whole = jax.jit(RUN[name])(*args, **kwargs)
    copies = {x: near(kwargs[x], kwargs["cursor"], 7) for x in ("cache_key", "cache_value")}
    copies = copies if not full_keys else {**copies, "cache_key": kwargs["cache_key"]}
    few = jax.jit(RUN[name])(*args, **{**kwargs, **copies}, rows=offloaded(kwargs["cursor"]))
    for at in (2, 3, 4):
        np.testing.assert_array_equal(few[at], whole[at])
    end = jnp.minimum(whole[3], 24)  # a full row stores nothing, though its cursor moves
    np.testing.assert_array_equal(few[1], near(whole[1], end, 7))
    np.testing.assert_array_equal(few[0], whole[0] if full_keys else near(whole[0], end, 7))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cursor", [(1, 4, 0, 9), (5, 22, 21, 8)])
def test_widen_page(name, cursor):
    key, position, cursor, before, after = stored(1, cursor)
    run = jax.jit(functools.partial(WIDEN[name], page_size=4))
    for got, want in zip(run(near(key, cursor, 6), position, cursor, *before, rows=offloaded(cursor)), after):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", NAMES)
def test_sentence_add(name):
    key, query, cursor, event, state = book(0)
    want = ADD[name](key, query, cursor, event, state)
    got = ADD[name](near(key, cursor, 5), query, cursor, event, state, rows=offloaded(cursor))
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", NAMES)
def test_store_codes(name):
    dim, slots = 16, 40
    rng = np.random.default_rng(2)
    key = jnp.asarray(rng.normal(size=(2, 2, slots, dim)), jnp.float32)
    cursor, stop = jnp.asarray([31, 18], jnp.int32), jnp.asarray([20, 9], jnp.int32)
    position = jnp.where(jnp.arange(slots)[None, None] < cursor[:, None, None], jnp.arange(slots), -1)
    position = jnp.broadcast_to(position, (2, 2, slots)).astype(jnp.int32)
    codes = [jnp.zeros((2, 2, slots, n), jnp.uint8) for n in (2, dim)]
    state = (*codes, *[jnp.zeros((2, 2, 2, 256), jnp.int32)] * 2, stop)
    fixed = {"num_local": LOCAL, "buffer": BUFFER, "scale": dim**-0.5}
    run = functools.partial(
        pallas_store.store_codes if name == "interpreted" else functools.partial(store_codes, implementation=name),
        **fixed,
        **({"interpret": True} if name == "interpreted" else {}),
    )
    rest = position, (cursor - 1)[:, None], cursor, signs_of(dim), *state
    want = jax.jit(run)(key, *rest)
    got = jax.jit(run)(near(key, cursor, 9), *rest, rows=offloaded(cursor))
    for a, b in zip(got, want):
        np.testing.assert_array_equal(a, b)


def test_host_rows_are_read_and_written():
    """Rows, windows and chunks at the end, over the end, of rows that stand still; memory is what it was."""
    x = np.random.default_rng(0).normal(size=(3, 2, 10, 4)).astype(np.float32)
    there = jax.device_put(x, jax.memory.Space.Host)
    slots = jnp.asarray([[3, 9, 0]] * 3, jnp.int32)[:, None]
    np.testing.assert_array_equal(jax.jit(take_rows)(there, slots), x[:, :, [3, 9, 0]])
    start = jnp.asarray([0, 8, 5], jnp.int32)
    window = jax.jit(take_window, static_argnums=2)(there, start, 4)
    np.testing.assert_array_equal(window[0], x[0, :, :4])
    np.testing.assert_array_equal(window[1, :, :2], x[1, :, 8:])
    np.testing.assert_array_equal(window[2], x[2, :, 5:9])
    new = np.random.default_rng(1).normal(size=(3, 2, 4, 4)).astype(np.float32)
    count = jnp.asarray([3, 4, 0], jnp.int32)
    after = jax.jit(put_rows)(there, jnp.asarray(new), start, count)
    assert after.sharding.memory_kind == "pinned_host"
    want = x.copy()
    want[0, :, :3], want[1, :, 8:] = new[0, :, :3], new[1, :, :2]
    np.testing.assert_array_equal(np.asarray(after), want)
    assert to_host(there) is there and to_device(jnp.asarray(x)).sharding.memory_kind == "device"
