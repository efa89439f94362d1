"""`dissimilarity` against float64 NumPy, on every implementation; interpreted where there is no GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.cases import compiled, every_body_and_dtype, implementations, one_shape

RUN = implementations("dissimilarity")


@every_body_and_dtype
@pytest.mark.parametrize("slots", one_shape(70, 5, 64))
def test_scores_equal_float64(name, slots, dtype):
    rng = np.random.default_rng(slots)
    position = rng.integers(-1, 3, (2, 3, slots))
    position[1, 2] = -1
    key = np.where(position[..., None] < 0, np.nan, rng.normal(size=(2, 3, slots, 32)) + 0.5)
    key[0, 0, 0] = 0  # a key without a direction
    key = jnp.asarray(key, dtype)
    run = compiled(RUN[name])
    got = np.asarray(run(key, jnp.asarray(position, jnp.int32)))
    exact = np.where(position[..., None] < 0, 0, np.asarray(key, np.float64))
    unit = exact / np.maximum(np.linalg.norm(exact, axis=-1, keepdims=True), 1e-8)
    mean = unit.sum(2) / np.maximum((position >= 0).sum(2), 1)[..., None]
    mean = mean / np.maximum(np.linalg.norm(mean, axis=-1, keepdims=True), 1e-8)
    np.testing.assert_allclose(got, -np.einsum("bhsd,bhd->bhs", unit, mean), atol=2e-6)
