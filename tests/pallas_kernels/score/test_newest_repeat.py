"""`newest_repeat` against float64 NumPy, on every implementation; the Pallas kernel runs interpreted without a GPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.score.rkv.newest_repeat import pallas_triton, reference
from tests.pallas_kernels.cases import NAMES, compiled, implementations, in_dtypes, one_shape

RUN = implementations("newest_repeat", config=pallas_triton.Config(block=16, tile=16, strip=32))
RUN = RUN | {"tiles": functools.partial(reference.newest_repeat, whole=1, tiles=(16, 12))}  # the last begin in those before
with_tiles = pytest.mark.parametrize("name", [*NAMES, "tiles"])
KINDS = ("random", "repeats", "same", "signs")


def problem(seed, kind, slots, dtype="float32", rows=2, heads=3, dim=16):
    """Keys of norm 1 and which slots are full; the others hold NaN. Head 1 of row 0 is empty, head 2 has one token."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(rows, heads, slots, dim))
    if kind == "repeats":  # of five keys
        key = np.take_along_axis(key, rng.integers(0, min(5, slots), (rows, heads, slots, 1)), 2)
    elif kind == "same":
        key[:] = key[:, :, :1]
    elif kind == "signs":  # their products are exact, and many are equal to the threshold
        key = np.sign(key)
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    valid = rng.random((rows, heads, slots)) < 0.8
    valid[0, 1] = False
    valid[0, 2] = np.arange(slots) == slots // 2
    key[~valid] = np.nan
    return jnp.asarray(key, dtype), jnp.asarray(valid)


def oracle(key, valid, threshold):
    key, valid = np.asarray(key.astype(jnp.float32), np.float64), np.asarray(valid)
    out = np.zeros(valid.shape, np.int32)
    for b, h, i in zip(*np.nonzero(valid), strict=True):
        near = [j for j in np.flatnonzero(valid[b, h]) if j != i and key[b, h, i] @ key[b, h, j] > threshold]
        out[b, h, i] = max(near, default=0)
    return out


@in_dtypes(with_tiles)
@pytest.mark.parametrize("slots", one_shape(75, 64, 33, 7, 1))
def test_slots_equal_float64(name, dtype, slots):
    run = compiled(RUN[name])
    for kind in KINDS:
        key, valid = problem(slots, kind, slots, dtype)
        # Products of equal keys are 1 but for rounding, except those of signs.
        for threshold in (0, 0.5, 0.93, *([1] if kind in ("random", "signs") else [])):
            if threshold == 1 and kind == "random":
                threshold = 1.01
            got = run(key, valid, threshold=jnp.float32(threshold))
            assert got.dtype == jnp.int32
            np.testing.assert_array_equal(got, oracle(key, valid, np.float32(threshold)), f"{kind} {threshold}")
