"""`window_score` against float64 NumPy, on every implementation; the Pallas kernels run interpreted without a GPU."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.score.window_score import pallas_triton, reference
from tests.pallas_kernels.cases import NAMES, SCALE, compiled, implementations, in_dtypes, one_shape

RUN = implementations("window_score", config=pallas_triton.Config(block=16, splits=2))
RUN = RUN | {"blocked": functools.partial(reference.window_score, block=16)}
with_blocks = pytest.mark.parametrize("name", [*NAMES, "blocked"])


def problem(seed, rows=2, heads=2, group=2, window=5, dim=32, slots=75, dtype="float32"):
    """A window that ends row 0, one with padding in row 1; slots in no order, some empty, which hold NaN."""
    rng = np.random.default_rng(seed)
    query, key = rng.normal(size=(rows, heads, group, window, dim)), rng.normal(size=(rows, heads, slots, dim))
    position = np.argsort(rng.random((rows, heads, slots)), axis=-1).astype(np.int32)
    position[rng.random(position.shape) < 0.2] = -1
    position[0, 1] = -1
    key[position < 0] = np.nan
    asked = slots - window + np.broadcast_to(np.arange(window, dtype=np.int32), (rows, window))
    asked = np.where((np.arange(rows) == 1)[:, None], asked - slots // 2, asked).astype(np.int32)
    asked[1:, : window // 2] = -1
    positions = {"query_position": jnp.asarray(asked), "key_position": jnp.asarray(position)}
    return (jnp.asarray(query, dtype), jnp.asarray(key, dtype)), positions


def oracle(query, key, query_position, key_position):
    query, key = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, jnp.nan_to_num(key)))
    asked, held = np.asarray(query_position)[:, None, None, :, None], np.asarray(key_position)[:, :, None, None]
    seen = (held >= 0) & (held <= asked)
    logits = np.where(seen, SCALE * np.einsum("bhgwd,bhsd->bhgws", query, key), -np.inf)
    weight = np.exp(logits - np.maximum(logits.max(-1, keepdims=True), -1e30))
    return (weight / np.maximum(weight.sum(-1, keepdims=True), 1e-300)).sum(3)


@in_dtypes(with_blocks)
@pytest.mark.parametrize(
    ("group", "window", "dim", "slots"), one_shape((3, 5, 16, 75), (4, 5, 64, 75), (3, 8, 16, 32), (1, 1, 128, 7))
)
def test_probabilities_equal_float64(name, dtype, group, window, dim, slots):
    arrays, positions = problem(window, group=group, window=window, dim=dim, slots=slots, dtype=dtype)
    got = compiled(RUN[name], scale=SCALE)(*arrays, **positions)
    assert got.dtype == jnp.float32
    want = oracle(*arrays, **positions)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    assert not np.asarray(got)[np.broadcast_to(np.asarray(positions["key_position"])[:, :, None] < 0, got.shape)].any()
