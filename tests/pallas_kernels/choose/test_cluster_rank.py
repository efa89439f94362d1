"""`cluster_rank` against float64 NumPy: every implementation; clusters without tokens, without room, or not in use."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._triton.split import Config
from tests.pallas_kernels.cases import close, compiled, every_body_and_dtype, every_kernel, implementations, one_shape

SCALE = 0.3
RANK = implementations("cluster_rank", config=Config(block=16, splits=3), part=16)
RANK = {name: functools.partial(run, scale=SCALE) for name, run in RANK.items()}


def clusters(seed, count, group=3, dim=16, dtype="float32"):
    """Four rows, of which all, half, one and none of the clusters are in use; the others hold NaN."""
    rng = np.random.default_rng(seed)
    query, centroid = rng.normal(size=(4, 2, group, dim)), rng.normal(size=(4, 2, count, dim))
    size, used = rng.integers(0, 9, (4, 2, count)), np.array([count, count // 2, 1, 0])
    size[2, :, 0] = 3, 0
    centroid[:, :, count // 3] = centroid[:, :, count // 5]  # equal scores
    for row, end in enumerate(used):
        centroid[row, :, end:], size[row, :, end:] = np.nan, 7
    size, used = (jnp.asarray(x, jnp.int32) for x in (size, used))
    return jnp.asarray(query, dtype), jnp.asarray(centroid, dtype), size, used


def expected(query, centroid, size, best, considered, room, capacity):
    """Of one head, all of whose clusters are in use: those listed, the tokens up to each, the considered, those with room."""
    logits = np.float64(query) @ np.float64(centroid).T * SCALE
    weight = np.exp(logits - logits.max(axis=1, keepdims=True))
    score = (weight / weight.sum(axis=1, keepdims=True)).sum(axis=0)
    order = [c for c in sorted(range(len(size)), key=lambda c: (-round(score[c], 9), c)) if size[c]]
    share = [min(len(size), max(math.ceil(x * len(size) * (1 - 1e-6)), 1)) for x in (best, considered)]
    listed = order[: min(share[0], capacity)]
    fits = [c for i, c in enumerate(listed) if sum(size[x] for x in listed[: i + 1]) <= room]
    listed = sorted(listed)
    ends = np.cumsum([size[c] if c in fits else 0 for c in listed])
    return logits, listed, ends, sorted(order[: share[1]]), sorted(fits)


@every_body_and_dtype
@pytest.mark.parametrize(
    ("count", "best", "considered", "room", "capacity"),
    one_shape((50, 0.2, 0.5, 35, 12), (50, 0.2, 0.5, 400, 8), (64, 1.0, 1.0, 100, 70), (33, 0.01, 0.01, 1, 1)),
)
def test_ranks_equal_float64(name, count, best, considered, room, capacity, dtype):
    arrays = clusters(count, count, dtype=dtype)
    logits, listed, ends, among, exact = compiled(RANK[name], capacity=capacity, room=room)(
        *arrays, jnp.float32(best), jnp.float32(considered)
    )
    query, centroid, size, used = map(np.asarray, arrays)
    crowded = 0
    for r, h in np.ndindex(4, 2):
        end = used[r]
        if not end:
            assert not any(x[r, h].any() for x in (listed, ends, among, exact))
            continue
        want, first, until, *flags = expected(
            query[r, h], centroid[r, h, :end], size[r, h, :end], best, considered, room, capacity
        )
        close(logits[r, h, :, :end], want, "float32")
        np.testing.assert_array_equal(listed[r, h], first + [0] * (capacity - len(first)))
        np.testing.assert_array_equal(ends[r, h], [*until, *[until[-1] if len(until) else 0] * (capacity - len(first))])
        for got, these in zip((among, exact), flags, strict=True):
            np.testing.assert_array_equal(np.flatnonzero(got[r, h]), these)
        crowded += sum(size[r, h, c] for c in first) > room
    assert crowded or room > 99


@every_kernel
def test_of_equal_clusters_the_first_have_room(name):
    query, centroid = jnp.ones((1, 1, 2, 16)), jnp.ones((1, 1, 40, 16))
    size, used = jnp.full((1, 1, 40), 3, jnp.int32), jnp.full((1,), 40, jnp.int32)
    _, listed, ends, considered, exact = compiled(RANK[name], capacity=20, room=10)(
        query, centroid, size, used, jnp.float32(0.25), jnp.float32(0.5)
    )
    np.testing.assert_array_equal(listed[0, 0], [*range(10), *[0] * 10])
    np.testing.assert_array_equal(ends[0, 0], [3, 6, *[9] * 18])
    np.testing.assert_array_equal(np.flatnonzero(considered[0, 0]), range(20))
    np.testing.assert_array_equal(np.flatnonzero(exact[0, 0]), range(3))
