"""True entries of masks as lists, against NumPy: every implementation, any division of the work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.compact import compact, pallas_triton
from tests.pallas_kernels.cases import MOSAIC, NEEDS_GPU, implementations, on_hopper, one_shape

LONG = pallas_triton.Config(tile=16, programs=12, alone=16)
COMPACTS = (
    implementations("compact", config=pallas_triton.Config(tile=16, programs=12))
    | on_hopper(compact)
    | {"interpreted long": implementations("compact", config=LONG)["interpreted"]}
)
COMPACT_NAMES = [pytest.param(x, marks=NEEDS_GPU) if x == "pallas_triton" else x for x in COMPACTS if x != MOSAIC]


@pytest.mark.parametrize("name", COMPACT_NAMES)
@pytest.mark.parametrize(("slots", "capacity"), one_shape((150, 40), (5, 9), (1, 1), (150, 150), (161, 1)))
def test_lists_are_the_true_entries(name, slots, capacity):
    mask = np.random.default_rng(slots).random((2, 2, slots)) < np.asarray([[0.0, 0.2], [0.7, 1.0]])[..., None]
    run = COMPACTS[name]
    for apply in (run, jax.vmap(run, in_axes=(0, None))):
        listed, keep = jax.jit(apply, static_argnums=1)(jnp.asarray(mask), capacity)
        for r, h in np.ndindex(2, 2):
            want = np.flatnonzero(mask[r, h])[:capacity]
            np.testing.assert_array_equal(listed[r, h, : len(want)], want)
            assert keep[r, h].sum() == len(want) == np.argmin(np.append(keep[r, h], False))
            assert not np.any(listed[r, h, len(want) :])
    flat, _ = jax.jit(run, static_argnums=1)(jnp.asarray(mask[1, 0]), capacity)
    np.testing.assert_array_equal(flat, listed[1, 0])
