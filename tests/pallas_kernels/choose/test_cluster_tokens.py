"""`cluster_tokens` against loops: every implementation; entries without tokens, and more tokens than fit."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.cases import compiled, every_body, implementations, one_shape

TOKENS = implementations("cluster_tokens", block=16)


def lists(seed, entries, slots=240):
    """Three rows; in the last nothing is listed and few slots hold a token."""
    rng = np.random.default_rng(seed)
    size = rng.integers(0, 6, (3, 2, 40))
    start = np.cumsum(size, axis=2) - size
    order = np.argsort(rng.random((3, 2, slots)), axis=2)
    listed = np.sort(np.argsort(rng.random((3, 2, 40)), axis=2)[..., :entries], axis=2)
    fits = rng.random(listed.shape) < 0.8
    fits[2] = False
    ends = np.cumsum(np.where(fits, np.take_along_axis(size, listed, axis=2), 0), axis=2)
    near, count = np.array([230, 235, 60]), np.array([240, 237, 2])
    return [jnp.asarray(x, jnp.int32) for x in (listed, ends, start, order, near, count)]


@every_body
@pytest.mark.parametrize(
    ("entries", "first", "most", "newest"), one_shape((13, 4, 50, 9), (1, 0, 7, 3), (16, 3, 20, 0), (39, 1, 90, 1))
)
def test_tokens_equal_loops(name, entries, first, most, newest):
    arrays = lists(entries, entries)
    slots, mask = compiled(TOKENS[name], first=first, most=most, newest=newest)(*arrays)
    listed, ends, start, order, near, count = map(np.asarray, arrays)
    for r, h in np.ndindex(3, 2):
        own = []
        for cluster, end in zip(listed[r, h], ends[r, h], strict=True):
            begin = start[r, h, cluster]
            own += order[r, h, begin : begin + end - len(own)].tolist()
        own = [*own[:most], *[-1] * (most - len(own))]
        ahead = [s if s < count[r] else -1 for s in range(near[r], near[r] + newest)]
        want = [s if s < count[r] else -1 for s in range(first)] + own + ahead
        np.testing.assert_array_equal(np.where(mask[r, h], slots[r, h], -1), want)
        assert not np.any(np.asarray(slots[r, h])[~np.asarray(mask[r, h])])
