"""`column_mass` against float64 NumPy; `test_dense_attention` has the XLA path after `dense_attention`."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.pallas_kernels.cases import compiled, every_body, implementations, one_shape

RUN = implementations("column_mass")


@every_body
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize(
    ("group", "tokens", "slots", "dtype"),
    one_shape(
        (3, 60, 200, "float32"), (3, 1, 70, "float32"), (1, 1, 5, "float32"), (4, 1, 150, "bfloat16"),
        (1, 300, 300, "bfloat16"), (8, 9, 70, "float32"),
    ),
)  # fmt: skip
def test_mass_equals_float64(name, group, tokens, slots, dtype, reduce):
    rng = np.random.default_rng(slots)
    # The first row's queries stand in order with padding behind; the second row has none but padding, or is in no order.
    asked = np.stack([20 + np.arange(tokens), rng.integers(-1, 60, tokens) if tokens > 1 else [-1]])
    asked[0, tokens - tokens // 4 :] = -1
    position = rng.integers(-1, 90, (2, 2, slots))
    position[:, :, 128:192] = -1  # a block of slots without a token
    key = np.where(position[..., None] < 0, np.nan, rng.normal(size=(2, 2, slots, 32)))
    query = np.where(asked[:, None, None, :, None] < 0, np.nan, rng.normal(size=(2, 2, group, tokens, 32)))
    query, key = jnp.asarray(query, dtype), jnp.asarray(key, dtype)
    seen = ((position >= 0)[..., None, :] & (position[..., None, :] <= asked[:, None, :, None]))[:, :, None]
    logits = 0.3 * np.einsum("bhgtd,bhsd->bhgts", *(np.nan_to_num(np.asarray(x, np.float64)) for x in (query, key)))
    weight = np.where(seen, np.exp(logits), 0)
    total = weight.sum(-1, keepdims=True)
    lse = jnp.asarray(np.log(total, where=total > 0, out=np.full_like(total, -np.inf)), jnp.float32)[..., 0]
    positions = {"query_position": jnp.asarray(asked, jnp.int32), "key_position": jnp.asarray(position, jnp.int32)}
    got = compiled(RUN[name], scale=0.3, reduce=reduce)(query, key, lse, **positions)
    want = getattr(np, reduce)(weight / np.where(total > 0, total, 1), axis=(2, 3))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-2 if dtype == "bfloat16" and name == "xla" else 1e-5)
