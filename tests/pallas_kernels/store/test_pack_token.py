"""Packing one token: every implementation against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.packed_vectors import unpack
from pallas_kernels.store.mosaickv.pack_token import pack_token
from tests.pallas_kernels.cases import TOLERANCE, compiled, every_body_and_dtype, on_mosaic_alone, one_shape

PACK = on_mosaic_alone(pack_token)


def buffers(seed, dtype, granule, rank, *, dim=64, rows=4, heads=2, segments=2, slots=40):
    """Arguments of `pack_token`: rows with the last token of a block, without a token, past the end, with a block's first."""
    rng = np.random.default_rng(seed)
    packed = np.array([2 * granule, 0, slots // granule * granule, granule], np.int32)
    place = np.array([packed[0] + 2 * granule - 1, -1, packed[2] + granule, packed[3] + granule], np.int32)
    key, value = (jnp.asarray(rng.normal(size=(rows, heads, 4 * granule, dim)), dtype) for _ in range(2))
    at = np.arange(4 * granule)[None, None]
    stored = np.broadcast_to(np.where(at <= (place - packed)[:, None, None], at, -1), (rows, heads, 4 * granule))
    key = jnp.where(jnp.asarray(stored >= 0)[..., None], key, jnp.nan)
    bases = [np.linalg.qr(rng.normal(size=(rows, heads, segments, dim, dim)))[0].astype(np.float32) for _ in range(2)]
    store = []
    for size in (slots, slots, slots // granule):
        store.append(jnp.asarray(rng.normal(size=(rows, heads, size, rank)), dtype))
        store.append(jnp.asarray(rng.integers(0, 99, (rows, heads, size, dim // 32)), jnp.int32))
    last = jnp.asarray(rng.integers(0, segments, rows), jnp.int32)
    arrays = key, value, jnp.asarray(stored, jnp.int32), jnp.asarray(place), jnp.asarray(packed), last
    return *arrays, *(jnp.asarray(x) for x in bases), tuple(store)


@every_body_and_dtype
@pytest.mark.parametrize(("granule", "rank"), one_shape((8, 16), (5, 8), (4, 64)))
def test_packed_tokens_equal_float64(name, dtype, granule, rank):
    args = buffers(granule, dtype, granule, rank)
    key, value, _, place, packed, last, basis_key, basis_value, store = args
    got = compiled(PACK[name], granule=granule)(*args)
    place, at = int(place[0]), int(place[0] - packed[0])
    first = at // granule * granule
    mean = np.asarray(key[0, :, first : at + 1], np.float64).sum(axis=1) / granule
    vectors = np.asarray(key[0, :, at], np.float64), np.asarray(value[0, :, at], np.float64), mean
    for i, (x, basis, index) in enumerate(
        zip(vectors, (basis_key, basis_value, basis_key), (place, place, place // granule), strict=True)
    ):
        for h in range(key.shape[1]):
            projected = np.asarray(basis[0, h, int(last[0])], np.float64) @ x[h]
            best = np.argsort(-np.abs(projected), kind="stable")[:rank]
            kept = np.zeros(len(projected))
            kept[best] = projected[best]
            full = jax.jit(unpack, static_argnums=2)(got[2 * i][0, h, index], got[2 * i + 1][0, h, index], len(projected))
            np.testing.assert_allclose(np.asarray(full, np.float64), kept, atol=TOLERANCE[dtype], rtol=0)
        for old, new in zip(store[2 * i : 2 * i + 2], got[2 * i : 2 * i + 2], strict=True):
            changed = (np.asarray(new) != np.asarray(old)).any(axis=(1, 3))
            there = [(0, index)] + [(3, int(args[3][3]))] * (i < 2)  # no mean of a part of a block
            assert list(zip(*changed.nonzero(), strict=True)) == there
