"""The index that ParisKV keeps: every implementation against rebuilding it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.key_codes import cluster_counts
from pallas_kernels.store.pariskv.store_codes import store_codes
from tests.pallas_kernels.cases import compiled, every_body, implementations, on_hopper, one_shape
from tests.pallas_kernels.store.test_encode import encoding, keys_to_encode, signs_of

LOCAL, BUFFER = 4, 3
STORE = implementations("store_codes") | on_hopper(store_codes)


def storing(name, dim, rotate=True):
    fixed = {"num_local": LOCAL, "buffer": BUFFER, "scale": dim**-0.5 if rotate else 1.0}
    return compiled(STORE[name], **fixed)


@every_body
@pytest.mark.parametrize(("heads", "rotate"), one_shape((3, True), (2, False)))
def test_index_kept_step_by_step_is_the_index_rebuilt(name, heads, rotate):
    """Rows grow at their own pace, and one row has empty slots."""
    dim, slots, steps = 16, 40, 16
    key, valid = keys_to_encode(7, dim, slots, heads=heads)
    valid[0] = True
    key = jnp.nan_to_num(jnp.asarray(key))
    rng = np.random.default_rng(0)
    cursor, stop = np.array([11, 13]), np.array([5, 9])  # sinks, then whatever has left the local window: 7 and 9
    counted = np.maximum(cursor - LOCAL, stop)
    make = encoding("xla" if name == "interpreted" else name, dim, rotate)
    codes = make(key, jnp.asarray(valid), signs_of(dim, rotate))
    written = np.arange(slots) < cursor[:, None]
    index = [jnp.where(written[:, None, :, None], x, jnp.zeros_like(x)) for x in codes]

    def count(low, high):
        live = valid & (np.arange(slots) >= low[:, None, None]) & (np.arange(slots) < high[:, None, None])
        return jax.jit(cluster_counts)(codes[0], live)

    state = (*index, count(np.array([2, 2]), stop), count(stop, counted), jnp.asarray(stop, jnp.int32))
    step = storing(name, dim, rotate)
    for _ in range(steps):
        active = rng.random(2) < 0.8
        cursor = cursor + active
        position = np.where(valid & (np.arange(slots) < cursor[:, None, None]), np.arange(slots), -1).astype(np.int32)
        # The token of a step is stored in every head.
        newest = (np.arange(slots) == cursor[:, None] - 1)[:, None] & active[:, None, None]
        position = np.where(newest, np.arange(slots), position).astype(np.int32)
        valid = valid | newest
        codes = make(key, jnp.asarray(valid), signs_of(dim, rotate))
        here = jnp.asarray(np.where(active, cursor - 1, -1)[:, None], jnp.int32)
        state = step(key, jnp.asarray(position), here, jnp.asarray(cursor, jnp.int32), signs_of(dim, rotate), *state)
        beyond = np.maximum(cursor - stop - LOCAL, 0)
        stop = stop + beyond // BUFFER * BUFFER
        np.testing.assert_array_equal(state[4], stop)
        np.testing.assert_array_equal(state[2], count(np.array([2, 2]), stop))
        np.testing.assert_array_equal(state[3], count(stop, np.maximum(cursor - LOCAL, stop)))
        for got, want in zip(state[:2], codes):
            below = (np.arange(slots) < cursor[:, None])[:, None, :, None]
            np.testing.assert_array_equal(got, jnp.where(below, want, jnp.zeros_like(want)))
