"""Sum and norm in one launch against NumPy; its derivative against finite differences."""

import functools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from pallas_kernels.layer.add_norm import add_norm
from tests.pallas_kernels.cases import compiled, every_body, implementations, on_hopper, one_shape

EPS = 1e-3
RUN = {name: functools.partial(run, eps=EPS) for name, run in (implementations("add_norm") | on_hopper(add_norm)).items()}


@every_body
@pytest.mark.parametrize("shape", [[3, 2, 80], *one_shape([5], [1, 1, 64], [1, 4096])])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_sum_and_norm_equal_numpy(name, shape, dtype):
    rng, shape = np.random.default_rng(0), tuple(shape)
    x, update = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    scale = jnp.asarray(rng.normal(size=shape[-1:]), dtype)
    after, normed = compiled(RUN[name])(x, update, scale)
    assert after.dtype == normed.dtype == dtype and after.shape == normed.shape == shape
    np.testing.assert_array_equal(after, x + update)
    wide = np.asarray(x + update, np.float64)
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * np.asarray(scale, np.float64)
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=tolerance, atol=1e-6)


def test_derivatives_equal_finite_differences():
    rng = np.random.default_rng(2)
    x, update, scale = (jnp.asarray(rng.normal(size=n), jnp.float32) for n in ((3, 8), (3, 8), (8,)))

    def loss(*args):
        after, normed = add_norm(*args, EPS)
        return jnp.sum(jnp.sin(after)) + jnp.sum(normed**3)

    jax.test_util.check_grads(jax.jit(loss), (x, update, scale), order=1, modes=("fwd", "rev"), rtol=2e-2)
