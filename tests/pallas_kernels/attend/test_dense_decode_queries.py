"""`dense_decode` with several queries of a row at positions, against float64 NumPy and against one query at a time."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_decode import pallas_triton
from pallas_kernels.formats.quantised import quantise, whole
from pallas_kernels.numerics import merge_partials
from tests.pallas_kernels.cases import (
    SCALE,
    alike,
    close,
    compiled,
    every_body,
    implementations,
    joined,
    one_shape,
    positioned_cache,
    softmax_attention,
)

CONFIG = pallas_triton.Config(block=16, splits=3)
RUN = implementations("dense_decode", config=CONFIG)


def cache(seed, group, length, dim=32, slots=75, dtype="float32"):
    """Ragged rows with holes, positions in no order, a padding query; a slot without a token or behind the limit is NaN.

    Returns query, key and value, the positions and limits by their names, and what each query sees, bool [B, H, G, T, S].
    """
    (query, key, value), where = positioned_cache(seed, group, dim, length, slots)
    limit, slot = jnp.asarray([slots, slots // 2 + 1], jnp.int32), np.arange(slots)
    at, asked = np.asarray(where["key_position"]), np.asarray(where["query_position"])
    held = (at >= 0) & (slot < np.asarray(limit)[:, None, None])
    seen = held[:, :, None, None] & (at[:, :, None, None] <= asked[:, None, None, :, None])
    seen = np.broadcast_to(seen, (*query.shape[:4], slots))
    key, value = (np.where(held[..., None], x, np.nan) for x in (key, value))
    arrays = [jnp.asarray(x, dtype) for x in (query, key, value)]
    return arrays, {"position": where["key_position"], "limit": limit, "query_position": where["query_position"]}, seen


def oracle(query, key, value, seen):
    return softmax_attention(query, key[:, :, None], value[:, :, None], seen)[:2]


@every_body
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("group", "length", "dim", "slots"),
    one_shape(
        (3, 5, 32, 75), (1, 1, 32, 75), (4, 2, 128, 64), (6, 8, 32, 130), (4, 6, 128, 300), (8, 8, 64, 33), (4, 7, 16, 17)
    ),
)
def test_several_queries_equal_float64(name, dtype, group, length, dim, slots):
    arrays, rest, seen = cache(slots, group, length, dim, slots, dtype)
    out, lse = compiled(RUN[name], scale=SCALE)(*arrays, **rest)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    close((out, lse), oracle(*arrays, seen), dtype)
    assert not np.any(out[1, :, :, 0]) and np.all(lse[1, :, :, 0] == -np.inf)  # the padding query


@every_body
def test_parts_partials_and_a_gap_with_several_queries(name):
    """Where nothing is beside, its output is NaN; slots of the gap hold no token."""
    (query, key, value), rest, seen = cache(4, 3, 5)
    gap, slot = np.asarray([[[16, 64], [5, 75]], [[0, 0], [20, 50]]], np.int32), np.arange(75)
    empty = (slot >= gap[..., :1]) & (slot < gap[..., 1:])
    rest["position"], seen = jnp.where(empty, -1, rest["position"]), seen & ~empty[:, :, None, None]
    rng = np.random.default_rng(1)
    beside, lse = rng.normal(size=query.shape).astype(np.float32), rng.normal(size=query.shape[:4]) * 3
    lse[0, 0, 1:], lse[1, :, :, :2] = -np.inf, -np.inf
    beside[lse == -np.inf] = np.nan
    partials = jnp.asarray(beside), jnp.asarray(lse, jnp.float32)
    want = joined(partials, *oracle(query, key, value, seen))
    got = compiled(RUN[name], scale=SCALE)(query, key, value, **rest, gap=jnp.asarray(gap), partials=partials)
    parts = compiled(RUN[name], scale=SCALE, parts=True)(query, key, value, **rest, gap=jnp.asarray(gap), partials=partials)
    assert parts[0].shape == (2, 2, parts[1].shape[2], 3, 5, 32) and parts[0].dtype == jnp.float32
    for result in (got, merge_partials(*(jnp.moveaxis(x, 2, 0) for x in parts))):
        close(result, want, "float32")


@every_body
@pytest.mark.parametrize(("dtype", "length"), [("bfloat16", 5), *(pytest.param(*x, marks=pytest.mark.thorough) for x in (
    ("float32", 5), ("bfloat16", 2), ("bfloat16", 8),
))])  # fmt: skip
def test_several_queries_on_codes_equal_dequantised_rows(name, dtype, length):
    (query, key, value), rest, seen = cache(5, 4, length, dtype=dtype)
    key, value = (quantise(jnp.where(jnp.isnan(x), 0, x), "int8") for x in (key, value))
    held = (rest["position"] >= 0) & (jnp.arange(75)[None, None] < rest["limit"][:, None, None])
    hidden = [x.__class__(codes=x.codes, scale=jnp.where(held, x.scale, jnp.nan), of=x.of) for x in (key, value)]
    got = compiled(RUN[name], scale=SCALE)(query, *hidden, **rest)
    close(got, oracle(query, whole(key), whole(value), seen), dtype)


@every_body
@pytest.mark.parametrize(("kind", "group", "length"), one_shape((None, 3, 5), (None, 4, 1), ("int8", 4, 5), ("int8", 6, 8)))
def test_what_each_slot_receives_from_the_first_query(name, kind, group, length):
    """In bfloat16, codes have a kernel of their own. In one row the first query is padding, and no slot receives anything."""
    (query, key, value), rest, seen = cache(6, group, length, dtype="float32" if kind is None else "bfloat16")
    if kind is not None:
        key, value = (quantise(jnp.nan_to_num(x), kind) for x in (key, value))
    out, lse, mass = compiled(RUN[name], scale=SCALE, mass=True)(query, key, value, **rest)
    weight = softmax_attention(query, whole(key)[:, :, None], whole(value)[:, :, None], seen)[2]
    close(mass, weight[:, :, :, 0].sum(axis=2), "float32" if kind is None else "bfloat16")
    assert not np.any(np.asarray(mass)[1]) and np.any(np.asarray(mass)[0])
    alike((out, lse), compiled(RUN[name], scale=SCALE)(query, key, value, **rest), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", one_shape(8, *range(1, 8)))
def test_queries_together_equal_queries_one_by_one(length):
    """Each query sees what a decode step at its position would find in the cache."""
    (query, key, value), rest, _ = cache(length, 2, length, dim=16, slots=40)
    asked = rest.pop("query_position")
    together = compiled(RUN["xla"], scale=SCALE)(query, key, value, **rest, query_position=asked)
    for t in range(length):
        position = jnp.where(rest["position"] <= asked[:, None, t, None], rest["position"], -1)
        one = compiled(RUN["xla"], scale=SCALE)(query[..., t, :], key, value, position=position, limit=rest["limit"])
        for a, b in zip(together, one, strict=True):
            np.testing.assert_allclose(a[:, :, :, t], b, rtol=1e-6, atol=1e-6)
