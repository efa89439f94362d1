"""`column_mass` of one query against float64 NumPy; `test_dense_attention` has the mass of several."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.column_mass import column_mass, pallas_triton
from tests.pallas_kernels.cases import compiled, every_body, implementations, one_shape

RUN = implementations(
    column_mass, functools.partial(pallas_triton.column_mass, interpret=True, limit=None, block=1024)
)


@every_body
@pytest.mark.parametrize(("group", "slots", "dtype"), one_shape((3, 70, "float32"), (1, 5, "float32"), (4, 150, "bfloat16")))
def test_mass_of_one_query_is_that_of_float64(name, group, slots, dtype):
    rng = np.random.default_rng(slots)
    asked = np.array([[40], [-1]])
    position = rng.integers(-1, 60, (2, 2, slots))
    key = np.where(position[..., None] < 0, np.nan, rng.normal(size=(2, 2, slots, 32)))
    query, key = jnp.asarray(rng.normal(size=(2, 2, group, 1, 32)), dtype), jnp.asarray(key, dtype)
    seen = (position >= 0) & (position <= asked[:, :, None])
    logits = 0.3 * np.einsum("bhgd,bhsd->bhgs", *(np.nan_to_num(np.asarray(x, np.float64)) for x in (query[..., 0, :], key)))
    weight = np.where(seen[:, :, None], np.exp(logits), 0)
    total = weight.sum(-1, keepdims=True)
    lse = jnp.asarray(np.log(total, where=total > 0, out=np.full_like(total, -np.inf)), jnp.float32)
    positions = {"query_position": jnp.asarray(asked, jnp.int32), "key_position": jnp.asarray(position, jnp.int32)}
    got = compiled(RUN[name], scale=0.3)(query, key, lse, **positions)
    want = (weight / np.where(total > 0, total, 1)).sum(2)
    np.testing.assert_allclose(got, want, atol=2e-2 if dtype == "bfloat16" and name == "xla" else 1e-5)


def test_refusals():
    key, position = jnp.zeros((3, 2, 21, 16)), jnp.zeros((3, 2, 21), jnp.int32)
    with pytest.raises(NotImplementedError, match="got 2 queries, expected 1"):
        column_mass(
            jnp.zeros((3, 2, 1, 2, 16)),
            key,
            jnp.zeros((3, 2, 1, 2)),
            query_position=jnp.zeros((3, 2), jnp.int32),
            key_position=position,
            scale=1.0,
            implementation="pallas_triton",
            platform="gpu",
        )
