"""`dense_decode` with several queries of a row at positions, against float64 NumPy and against one query at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_decode import pallas_triton
from pallas_kernels.formats.quantised import quantise, whole
from pallas_kernels.numerics import merge_partials
from tests.pallas_kernels import cases

CONFIG = pallas_triton.Config(block=16, splits=3)
RUN = cases.implementations("dense_decode", config=CONFIG)


def cache(seed, group, length, dim=32, slots=75, dtype="float32"):
    """Ragged rows with holes, positions in no order, a padding query; a slot without a token or behind the limit is NaN.

    Returns query, key and value, the positions and limits by their names, and what each query sees, bool [B, H, G, T, S].
    """
    (query, key, value), where = cases.positioned_cache(seed, group, dim, length, slots)
    limit, slot = jnp.asarray([slots, slots // 2 + 1], jnp.int32), np.arange(slots)
    at, asked = np.asarray(where["key_position"]), np.asarray(where["query_position"])
    held = (at >= 0) & (slot < np.asarray(limit)[:, None, None])
    seen = held[:, :, None, None] & (at[:, :, None, None] <= asked[:, None, None, :, None])
    seen = np.broadcast_to(seen, (*query.shape[:4], slots))
    key, value = (np.where(held[..., None], x, np.nan) for x in (key, value))
    arrays = [jnp.asarray(x, dtype) for x in (query, key, value)]
    return arrays, {"position": where["key_position"], "limit": limit, "query_position": where["query_position"]}, seen


def oracle(query, key, value, seen):
    return cases.softmax_attention(query, key[:, :, None], value[:, :, None], seen)[:2]


MORE = [
    (None, "bfloat16", 3, 5, 32, 75), (None, "bfloat16", 1, 1, 32, 75), (None, "float32", 4, 2, 128, 64),
    (None, "float32", 6, 8, 32, 130), (None, "bfloat16", 4, 6, 128, 300), (None, "float32", 8, 8, 64, 33),
    (None, "float32", 4, 7, 16, 17), ("int8", "float32", 4, 5, 32, 75), ("int8", "bfloat16", 6, 8, 32, 75),
]  # fmt: skip


@cases.every_body
@pytest.mark.parametrize(
    ("kind", "dtype", "group", "length", "dim", "slots"),
    [
        (None, "float32", 3, 5, 32, 75),
        ("int8", "bfloat16", 4, 5, 32, 75),
        *(pytest.param(*x, marks=cases.thorough) for x in MORE),
    ],
)
def test_several_queries_and_what_each_slot_receives_equal_float64(name, kind, dtype, group, length, dim, slots):
    """A slot receives from the first query. In bfloat16, codes have a kernel of their own. A row's first query is padding."""
    (query, *stored), rest, seen = cache(slots + 1, group, length, dim, slots, dtype)
    exact = stored
    if kind is not None:
        held = ~np.isnan(np.asarray(stored[0], np.float32)[..., 0])
        stored = [jax.jit(quantise, static_argnums=1)(np.nan_to_num(x), kind) for x in stored]
        exact = [jax.jit(whole)(x) for x in stored]
        stored = [dataclasses.replace(x, scale=jnp.where(held, x.scale, jnp.nan)) for x in stored]
    out, lse, mass = cases.compiled(RUN[name], scale=cases.SCALE, mass=True)(query, *stored, **rest)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    *want, weight = cases.softmax_attention(query, *(x[:, :, None] for x in exact), seen)
    cases.close((out, lse, mass), (*want, weight[:, :, :, 0].sum(axis=2)), dtype)
    assert not np.any(out[1, :, :, 0]) and np.all(lse[1, :, :, 0] == -np.inf)
    assert not np.any(np.asarray(mass)[1])


@cases.every_body
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
    want = cases.joined(partials, *oracle(query, key, value, seen))
    got = cases.compiled(RUN[name], scale=cases.SCALE)(query, key, value, **rest, gap=jnp.asarray(gap), partials=partials)
    parts = cases.compiled(RUN[name], scale=cases.SCALE, parts=True)(
        query, key, value, **rest, gap=jnp.asarray(gap), partials=partials
    )
    assert parts[0].shape == (2, 2, parts[1].shape[2], 3, 5, 32) and parts[0].dtype == jnp.float32
    for result in (got, jax.jit(merge_partials)(*(np.moveaxis(x, 2, 0) for x in parts))):
        cases.close(result, want, "float32")
