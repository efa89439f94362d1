"""`partial_score` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.score.infinigen.partial_score import pallas_triton
from tests.pallas_kernels.cases import SCALE, alike, compiled, every_body_and_dtype, implementations, one_shape

ALPHA = np.float32(1.5)
RUN = implementations("partial_score", config=pallas_triton.Config(block=32, programs=18))
RUN = {name: functools.partial(run, scale=SCALE) for name, run in RUN.items()}


def problem(seed, group=3, channels=5, slots=75, dtype="float32"):
    """Rows that are full, half full and empty; NaN are empty slots, the newest token of a row, and what is behind all."""
    rng = np.random.default_rng(seed)
    query, key = 3 * rng.normal(size=(3, 2, group, channels)), rng.normal(size=(3, 2, channels, slots + -slots % 16))
    cursor = np.asarray([slots, slots // 2 + 1, 0], np.int32)
    held = (rng.random((3, 2, slots)) < 0.8) & (np.arange(slots) < cursor[:, None, None])
    held[0, :, -1], held[1, 1] = True, False
    held[1, 0, cursor[1] - 1] = False  # a head without the newest token
    empty = ~held | ((np.arange(slots) == slots - 1) & (np.arange(3) == 0)[:, None, None])
    key[..., :slots] = np.where(empty[:, :, None], np.nan, key[..., :slots])
    key[..., slots:] = np.nan
    position = jnp.asarray(np.where(held, np.arange(slots), -1), jnp.int32)
    return *(jnp.asarray(x, dtype) for x in (query, key)), position, jnp.asarray(cursor)


def oracle(query, key, position, cursor):
    """Float64 scores; how many logits come near the largest, give or take those too near to tell; how many tokens."""
    query, key = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, key))
    held = np.asarray(position) >= 0
    newest = np.arange(held.shape[2]) == np.asarray(cursor)[:, None, None] - 1
    others = held & ~newest
    logits = np.where(others[:, :, None], SCALE * query @ np.nan_to_num(key[..., : held.shape[2]]), -np.inf)
    edge = np.maximum(logits.max(axis=3, keepdims=True), -1e30) - ALPHA
    near = [np.sum(logits >= edge + side, axis=(1, 2, 3)) for side in (1e-4, -1e-4)]
    score = np.where(others, logits.mean(axis=2), np.where(newest & held, np.inf, -np.inf))
    return score, near, others.sum(axis=2)


@every_body_and_dtype
@pytest.mark.parametrize(("group", "channels", "slots"), one_shape((3, 5, 75), (1, 16, 16), (4, 25, 130), (12, 51, 33)))
def test_scores_and_counts_equal_float64(name, dtype, group, channels, slots):
    args = problem(slots, group, channels, slots, dtype)
    run = compiled(RUN[name])
    got = run(*args, jnp.asarray(ALPHA))
    score, (least, most), stored = oracle(*args)
    assert [x.dtype for x in got] == ["float32", "int32", "int32"]
    np.testing.assert_allclose(got[0], score, rtol=2e-5, atol=2e-5)
    assert np.all((least <= got[1]) & (got[1] <= most)) and np.sum(most - least) < 3 and most[0] > 0
    np.testing.assert_array_equal(got[2], stored)
    alike(got, run(*args, jnp.asarray(ALPHA)))
