"""`store_ids` against float64 NumPy: every implementation; rows that wait or are full, copies of an offloaded cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats import bit_codes
from pallas_kernels.store.pqcache.store_ids import STORE_IDS, store_ids
from tests.pallas_kernels.cases import compiled, every_body_and_dtype, implementations, near, offloaded, one_shape

STORE = implementations("store_ids")


def numbers_of(key, centroids):
    """The first of the nearest centroids of each part of a key [D], in float64."""
    parts = np.asarray(key, np.float64).reshape(len(centroids), -1)
    away = np.round(((np.asarray(centroids, np.float64) - parts[:, None]) ** 2).sum(axis=2), 5)
    return away.argmin(axis=1)


@every_body_and_dtype
@pytest.mark.parametrize(
    ("count", "parts", "dim", "copies"),
    one_shape((6, 2, 24, None), (64, 2, 16, 5), (4, 3, 12, None), (2, 1, 8, 7), (5, 4, 16, 5)),
)
def test_codes_equal_float64(name, count, parts, dim, copies, dtype):
    """Tokens come one by one; rows wait at times, one never has a token, and one is full from the beginning."""
    rng, slots = np.random.default_rng(count), 24
    key, centroids = rng.normal(size=(4, 3, slots, dim)), rng.normal(size=(4, 3, parts, count, dim // parts))
    centroids[:, :, :, -1] = centroids[:, :, :, 0]
    key[2] = np.nan  # a row without tokens may hold anything
    key, centroids = jnp.asarray(key, dtype), jnp.asarray(centroids, jnp.float32)
    bits = parts * bit_codes.bits_of(count)
    cursor, wanted = np.array([0, 9, 5, slots]), np.zeros((4, 3, slots), np.int32)
    ids, unpack = jax.jit(bit_codes.pack, static_argnums=1)(wanted, bits), jax.jit(bit_codes.unpack, static_argnums=(1, 2))
    for _ in range(8):
        active = (rng.random(4) < 0.8) & [True, True, False, True]
        cursor = cursor + active
        for r in np.flatnonzero(active & (cursor <= slots)):
            slot = cursor[r] - 1
            for h in range(3):
                number = numbers_of(key[r, h, slot].astype(jnp.float32), centroids[r, h])
                wanted[r, h, slot] = (number << np.arange(parts) * bit_codes.bits_of(count)).sum()
        end = jnp.asarray(cursor, jnp.int32)
        here = jnp.asarray(np.where(active, cursor - 1, -1)[:, None], jnp.int32)
        held, rows = (key, None) if copies is None else (near(key, cursor, copies), offloaded(end))
        ids = compiled(STORE[name])(held, here, end, centroids, ids, rows=rows)
        np.testing.assert_array_equal(unpack(ids, slots, bits), wanted)


@pytest.mark.thorough
def test_several_tokens_at_once_are_plain_jax():
    rng = np.random.default_rng(0)
    key = jnp.asarray(rng.normal(size=(2, 1, 12, 8)), jnp.float32)
    centroids = jnp.asarray(rng.normal(size=(2, 1, 2, 4, 4)), jnp.float32)
    ids = bit_codes.pack(jnp.zeros((2, 1, 12), jnp.int32), 4)
    cursor, active = jnp.array([7, 4]), jnp.array([[4, 5, 6], [3, -1, -1]])
    codes = bit_codes.unpack(store_ids(key, active, cursor, centroids, ids), 12, 4)
    wanted = np.zeros((2, 1, 12), int)
    for r, slot in ((0, 4), (0, 5), (0, 6), (1, 3)):
        wanted[r, 0, slot] = (numbers_of(key[r, 0, slot], centroids[r, 0]) << np.arange(2) * 2).sum()
    np.testing.assert_array_equal(codes, wanted)
    chosen = [STORE_IDS.resolve(key, active[:, :n], cursor, centroids, ids, platform="gpu") for n in (1, 3)]
    assert chosen == ["pallas_triton", "xla"]
