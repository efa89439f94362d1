"""Dense attention of a cache with holes, and its column mass, against float64 NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_attention import dense_attention
from pallas_kernels.numerics import merge_partials
from pallas_kernels.score.column_mass import column_mass
from tests.pallas_kernels.cases import SCALE, close, compiled, dense_oracle, one_shape, positioned_cache


@pytest.mark.parametrize("block", [7, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim", "length"), one_shape((4, 64, 5), (1, 128, 1)))
def test_attention_and_column_mass_equal_float64(block, dtype, group, dim, length):
    (query, key, value), positions = positioned_cache(group, group, dim, length, dtype=dtype)
    expected = dense_oracle(query, key, value, **positions)
    run = compiled(dense_attention, scale=SCALE, block=block)
    out, lse = run(query, key, value, **positions)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    close(out, expected[0], dtype)
    close(lse, expected[1], dtype)
    assert not np.any(out[0, 1]) and not np.any(out[1, :, :, 0])
    mass = compiled(column_mass, scale=SCALE, block=block)(query, key, lse, **positions)
    assert mass.dtype == jnp.float32
    close(mass, expected[2].sum((2, 3)), dtype)


@pytest.mark.parametrize("limit", [0, 16, 20, 50])
def test_a_limit_hides_nothing_and_skips_the_rest(limit):
    (query, key, value), positions = positioned_cache(7)
    positions["key_position"] = jnp.where(jnp.arange(50)[None, None] < limit, positions["key_position"], -1)
    run = compiled(dense_attention, scale=SCALE, block=16)
    plain = run(query, key, value, **positions)
    bounded = run(query, key, value, **positions, limit=jnp.int32(limit))
    for a, b in zip(plain, bounded):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    if limit == 16:  # a limit that lies skips whole blocks: the loop really stops there
        (_, _, _), full = positioned_cache(7)
        early = run(query, key, value, **full, limit=jnp.int32(limit))
        for a, b in zip(plain, early):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_chunks_of_a_prompt_skip_the_future():
    """Whole blocks in the future are never read, so NaN in the values there changes nothing."""
    (query, key, value), positions = positioned_cache(8, slots=64)
    positions["key_position"] = jnp.broadcast_to(jnp.arange(64), (2, 2, 64))
    positions["query_position"] = jnp.broadcast_to(jnp.arange(10, 15), (2, 5))
    key, value = jnp.nan_to_num(key), jnp.nan_to_num(value).at[:, :, 16:].set(jnp.nan)
    out, _ = compiled(dense_attention, scale=SCALE, block=16)(query, key, value, **positions)
    close(out, dense_oracle(query, key, value, **positions)[0], "float32")


def test_a_mapped_call_equals_calls_one_by_one():
    pairs = [positioned_cache(seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *pairs)
    fn = compiled(dense_attention, scale=SCALE, block=16)
    together = jax.jit(jax.vmap(lambda arrays, positions: fn(*arrays, **positions)))(*stacked)
    for i, (arrays, positions) in enumerate(pairs):
        for a, b in zip(fn(*arrays, **positions), together):
            np.testing.assert_allclose(a, b[i], rtol=1e-6, atol=1e-6)


def test_wrong_shapes_and_dtypes_are_refused():
    (query, key, value), positions = positioned_cache(1)
    with pytest.raises(ValueError, match="dense_attention: got query"):
        dense_attention(query, key[..., 1:], value, **positions, scale=SCALE)
    with pytest.raises(ValueError, match="dense_attention: got value"):
        dense_attention(query, key, value[:, :, 1:], **positions, scale=SCALE)
    with pytest.raises(ValueError, match="got query bfloat16 and key float32, expected the same dtype"):
        dense_attention(query.astype(jnp.bfloat16), key, value, **positions, scale=SCALE)
    with pytest.raises(ValueError, match="got block=0, expected at least 1 slot"):
        dense_attention(query, key, value, **positions, scale=SCALE, block=0)
    with pytest.raises(ValueError, match="column_mass: got lse"):
        column_mass(query, key, query, **positions, scale=SCALE)
    with pytest.raises(ValueError, match="merge_partials: got out"):
        merge_partials(query, key)
