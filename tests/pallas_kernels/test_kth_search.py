"""The search for the k-th largest: keys, how often it counts, and the threshold that it finds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._triton.kth_best import threshold_of
from pallas_kernels._triton.kth_search import NEVER, find, hits_of, order_key, pair_of


@pytest.mark.slow
@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize(
    "kind", ["normal", "ties", "forced", *(pytest.param(x, marks=pytest.mark.thorough) for x in ("equal", "exponential"))]
)
def test_search_needs_few_counts(kind, two):
    """Interpolated pivots: far fewer counts than 32 on ordinary data, and never many more."""
    rng = np.random.default_rng(3)
    score = rng.normal(size=4096).astype(np.float32)
    score = {
        "ties": np.round(score * 2),
        "equal": np.ones_like(score),
        "forced": np.where(rng.random(4096) < 0.01, np.float32(np.inf), score),
        "exponential": np.exp(8 * score),
    }.get(kind, score)
    key = np.sort(np.asarray(order_key(jnp.asarray(score))))
    for wanted in (1, 2048, 4000):
        calls = []

        def count(pivot, calls=calls):
            jax.debug.callback(calls.append, pivot)
            return jnp.sum(jnp.asarray(key) >= pivot, dtype=jnp.int32)

        def below(pivot):
            return jnp.max(jnp.where(key < pivot, key, NEVER))

        def pair(left, right, calls=calls):
            jax.debug.callback(calls.append, left)
            return pair_of(hits_of(jnp.asarray(key), left, right))

        pair = pair if two else None
        threshold, reach, over = find(count, below, int(key[0]), int(key[-1]) + 1, 4096, wanted, 0, pair=pair)
        jax.effects_barrier()
        assert (key >= int(threshold)).sum() == reach and reach >= wanted
        assert reach == wanted or (key > int(threshold)).sum() == over < wanted
        assert len(calls) <= (20 if two else 40)
        loose, reach, _ = find(lambda p: jnp.sum(jnp.asarray(key) >= p, dtype=jnp.int32), below,
                               int(key[0]), int(key[-1]) + 1, 4096, wanted, wanted >> 3)  # fmt: skip
        assert (key >= int(loose)).sum() == reach
        assert wanted <= reach and (reach <= wanted + (wanted >> 3) or (key > int(loose)).sum() < wanted)


def test_order_keys_sort_as_floats_do():
    values = np.asarray([-np.inf, np.finfo("f4").min, -1.5, -1e-45, -0.0, 0.0, 1e-45, 2.0, np.finfo("f4").max, np.inf], "f4")
    key = np.asarray(order_key(jnp.asarray(values)))
    steps = np.diff(key.astype(np.int64))
    assert key[0] == NEVER and steps[4] == 0 and np.all(np.delete(steps, 4) > 0)
    assert order_key(jnp.asarray([np.nan], jnp.float32))[0] == NEVER


SCORES = {
    "random": lambda rng, n: rng.normal(size=n),
    "small": lambda rng, n: 1e-38 * rng.normal(size=n),
    "ties": lambda rng, n: np.round(rng.normal(size=n)),
    "equal": lambda rng, n: np.full(n, 1.5),
    "holes": lambda rng, n: np.where(rng.random(n) < 0.3, -np.inf, rng.normal(size=n)),
    "infinite": lambda rng, n: np.where(rng.random(n) < 0.3, np.inf, rng.normal(size=n)),
    "undefined": lambda rng, n: np.where(rng.random(n) < 0.3, np.nan, rng.normal(size=n)),
    "both signs, all sizes": lambda rng, n: rng.choice([-1, 1], n) * np.exp(rng.uniform(-80, 80, n)),
    "largest": lambda rng, n: np.where(rng.random(n) < 0.5, -1e-30, 3.4e38) * rng.uniform(0.9, 1, n),
}


@pytest.mark.parametrize("repeated", [False, True])
def test_the_threshold_divides_the_best_from_the_rest(repeated):
    """Of any scores, each of which stands once or several times: keys above it, and the first of those that equal it."""
    rng, wanted = np.random.default_rng(1), np.array([1, 2, 7, 100, 255, 256, 300])
    rows = [np.repeat(make(rng, 256), copies)[:256] for make in SCORES.values() for copies in (1, 5)]
    key = order_key(jnp.asarray(np.stack(rows), jnp.float32))
    run = functools.partial(threshold_of, slack=0, threads=32, interpret=True, repeated=repeated)
    run = jax.jit(jax.vmap(jax.vmap(run, in_axes=(None, 0)), in_axes=(0, None)))
    threshold, number, ties = (np.asarray(x) for x in run(key, jnp.asarray(wanted, jnp.int32)))
    held, threshold = np.asarray(key)[:, None], threshold[..., None]
    np.testing.assert_array_equal(number, np.minimum(wanted, (held > NEVER).sum(axis=2)))
    above, equal = (held > threshold).sum(axis=2), ((held == threshold) & (held > NEVER)).sum(axis=2)
    np.testing.assert_array_equal(above + np.minimum(equal, ties), number)
