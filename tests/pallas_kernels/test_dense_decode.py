"""`dense_decode` and `merge_splits` against float64 NumPy; the Pallas kernels interpreted here, compiled on a GPU."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dense_decode import DENSE_DECODE, cudnn, dense_decode, pallas_triton
from pallas_kernels.merge_splits import MERGE_SPLITS, merge_splits
from pallas_kernels.merge_splits import pallas_triton as merge_kernel
from pallas_kernels.numerics import merge_partials
from tests.pallas_kernels.test_kernels import NEEDS_GPU, SCALE, close, softmax_attention

CONFIG = pallas_triton.Config(block=16, splits=3)
DENSE = {
    "xla": functools.partial(dense_decode, implementation="xla"),
    "interpreted": functools.partial(pallas_triton.dense_decode, config=CONFIG, interpret=True),
    "pallas_triton": functools.partial(dense_decode, implementation="pallas_triton"),
}
MERGE = {
    "xla": functools.partial(merge_splits, implementation="xla"),
    "interpreted": lambda out, lse, dtype=jnp.float32: merge_kernel.merge_splits(out, lse, dtype=dtype, interpret=True),
    "pallas_triton": functools.partial(merge_splits, implementation="pallas_triton"),
}
every_body = pytest.mark.parametrize("name", ["xla", "interpreted", pytest.param("pallas_triton", marks=NEEDS_GPU)])


def cache(seed, group=4, dim=64, slots=75, dtype="float32", rows=3, heads=2, holes=0.3):
    """Random query, cache and limits; every slot that must not enter is NaN, held or not."""
    rng = np.random.default_rng(seed)
    query, key, value = (rng.normal(size=(rows, heads, n, dim)).astype(np.float32) for n in (group, slots, slots))
    position = np.argsort(rng.random((rows, heads, slots)), axis=-1).astype(np.int32)
    position[rng.random(position.shape) < holes] = -1
    limit = np.asarray([slots, 0, slots // 2 + 1][:rows], np.int32)
    seen = (position >= 0) & (np.arange(slots) < limit[:, None, None])
    key[~seen], value[~seen] = np.nan, np.nan
    arrays = [jnp.asarray(x, dtype) for x in (query, key, value)]
    return arrays, {"position": jnp.asarray(position), "limit": jnp.asarray(limit)}, seen


@every_body
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim", "slots"), [(1, 64, 75), (4, 128, 64), (3, 32, 17), (8, 64, 130)])
def test_dense_decode(name, dtype, group, dim, slots):
    arrays, rest, seen = cache(slots, group, dim, slots, dtype)
    run = jax.jit(functools.partial(DENSE[name], scale=SCALE))
    out, lse = run(*arrays, **rest)
    query, key, value = (np.asarray(x, np.float32) for x in arrays)
    expected = softmax_attention(query, key, value, np.broadcast_to(seen[:, :, None], (*query.shape[:3], slots)))
    assert out.dtype == dtype and lse.dtype == jnp.float32
    close(out, expected[0], dtype)
    close(lse, expected[1], dtype)
    assert not np.any(out[1]) and np.all(lse[1] == -np.inf)
    for first, second in zip((out, lse), run(*arrays, **rest)):
        np.testing.assert_array_equal(first, second)


@every_body
def test_a_limit_beyond_the_cache_or_below_zero_is_clipped(name):
    arrays, rest, _ = cache(1)
    run = functools.partial(DENSE[name], *arrays, position=rest["position"], scale=SCALE)
    plain = run(limit=rest["limit"])
    for a, b in zip(plain, run(limit=jnp.asarray([2**31 - 1, -(2**31), 38], jnp.int32))):
        np.testing.assert_array_equal(a, b)


@every_body
def test_vmap_and_loop(name):
    pairs = [cache(seed)[:2] for seed in (1, 2)]
    arrays, rest = jax.tree.map(lambda *x: jnp.stack(x), *pairs)
    fn = functools.partial(DENSE[name], scale=SCALE)
    together = jax.vmap(lambda arrays, rest: fn(*arrays, **rest))(arrays, rest)
    for i, (arrays, rest) in enumerate(pairs):
        for a, b in zip(fn(*arrays, **rest), together):
            np.testing.assert_allclose(a, b[i], rtol=1e-6, atol=1e-6)
    (query, key, value), rest = pairs[0]
    # The output of a row that sees nothing is 0, so the last query is 0 there too.
    last = jax.lax.fori_loop(0, 3, lambda _, q: fn(q, key, value, **rest)[0], query)
    for _ in range(3):
        query = fn(query, key, value, **rest)[0]
    np.testing.assert_allclose(last, query, rtol=1e-5, atol=1e-6)


def test_splits_and_blocks_change_nothing_but_rounding():
    arrays, rest, _ = cache(2)
    whole = DENSE["xla"](*arrays, **rest, scale=SCALE)
    for block, splits in [(16, 1), (64, 2), (128, 1), (16, 9)]:  # 128 slots do not fit 75: the block is halved
        config = pallas_triton.Config(block=block, splits=splits)
        parts = pallas_triton.dense_decode(*arrays, **rest, scale=SCALE, config=config, interpret=True)
        for a, b in zip(whole, parts):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_default_config_fills_the_gpu_once():
    assert pallas_triton.default_config(8, 131072).splits == 33
    assert pallas_triton.default_config(64, 131072).splits == 4
    assert pallas_triton.default_config(8, 100).splits == 2
    assert pallas_triton.default_config(1000, 131072).splits == 1


def partials(seed, parts, dim=64, lists=3, group=3):
    rng = np.random.default_rng(seed)
    out = rng.normal(size=(lists, parts, group, dim)).astype(np.float32)
    lse = 3 * rng.normal(size=out.shape[:3]).astype(np.float32)
    lse[rng.random(lse.shape) < 0.3] = -np.inf
    lse[1] = -np.inf
    out[lse == -np.inf] = np.nan
    return jnp.asarray(out), jnp.asarray(lse)


@every_body
@pytest.mark.parametrize(("parts", "dim"), [(1, 64), (5, 80), (49, 128)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merge_splits(name, parts, dim, dtype):
    out, lse = partials(parts, parts, dim)
    merged, whole = jax.jit(functools.partial(MERGE[name], dtype=dtype))(out, lse)
    weight = np.exp(np.float64(lse))
    total = weight.sum(1)
    expected = (np.nan_to_num(np.float64(out)) * weight[..., None]).sum(1) / np.where(total > 0, total, 1)[..., None]
    assert merged.dtype == dtype and whole.dtype == jnp.float32
    close(merged, expected, dtype)
    with np.errstate(divide="ignore"):
        close(whole, np.log(total), "float32")
    assert not np.any(merged[1]) and np.all(whole[1] == -np.inf)


@every_body
def test_merge_vmap(name):
    out, lse = (jnp.stack(x) for x in zip(partials(1, 5), partials(2, 5)))
    for i, (merged, whole) in enumerate(zip(*jax.vmap(MERGE[name])(out, lse))):
        for a, b in zip(MERGE[name](out[i], lse[i]), (merged, whole)):
            np.testing.assert_array_equal(a, b)


def test_merge_partials_of_disjoint_parts():
    (query, key, value), rest, _ = cache(5, slots=80)
    whole = dense_decode(query, key, value, **rest, scale=SCALE)
    parts = []
    for first, last in ((0, 33), (33, 80)):
        piece = key[:, :, first:last], value[:, :, first:last]
        position, limit = rest["position"][:, :, first:last], rest["limit"] - first
        parts.append(dense_decode(query, *piece, position=position, limit=limit, scale=SCALE))
    parts.append((jnp.full_like(whole[0], jnp.nan), jnp.full_like(whole[1], -jnp.inf)))  # an empty part
    for a, b in zip(whole, jax.jit(merge_partials)(*(jnp.stack(x) for x in zip(*parts)))):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "dtype", "dim", "slots", "expected"),
    [
        ("cpu", "bfloat16", 64, 32, "xla"),
        ("tpu", "bfloat16", 64, 32, "xla"),
        ("gpu", "bfloat16", 64, 32, "pallas_triton"),
        ("gpu", "float32", 64, 32, "pallas_triton"),
        # cuDNN would take these, but it knows nothing of empty slots.
        ("gpu", "bfloat16", 80, 32, "xla"),
        ("gpu", "bfloat16", 64, 8, "xla"),
    ],
)
def test_resolve_from_shapes_alone(platform, dtype, dim, slots, expected):
    query = jax.ShapeDtypeStruct((1, 2, 4, dim), dtype)
    rows = jax.ShapeDtypeStruct((1, 2, slots, dim), dtype)
    rest = {"position": jax.ShapeDtypeStruct(rows.shape[:3], "int32"), "limit": jax.ShapeDtypeStruct((1,), "int32")}
    assert DENSE_DECODE.resolve(query, rows, rows, **rest, scale=SCALE, platform=platform) == expected


def test_impossible_implementations(monkeypatch):
    arrays, rest, _ = cache(1)
    run = functools.partial(dense_decode, **rest, scale=SCALE, platform="gpu")
    with pytest.raises(NotImplementedError, match="got float32 and head_dim 64, expected 16 bits and at most 128"):
        run(*arrays, implementation="cudnn")
    for name in ("pallas_triton", "jax_triton", "cudnn"):
        with pytest.raises(NotImplementedError, match="got head_dim 48, expected a power of two from 16 to 256"):
            run(*(x[..., :48] for x in arrays), implementation=name)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(NotImplementedError, match=r"needs the package jax_triton \(pip install kvjax\[triton\]\)"):
        run(*arrays, implementation="jax_triton")
    out = jax.ShapeDtypeStruct((1, 2000, 1, 64), "float32")
    lse = jax.ShapeDtypeStruct((1, 2000, 1), "float32")
    assert MERGE_SPLITS.resolve(out, lse, dtype=jnp.float32, platform="gpu") == "xla"


def test_bad_arguments():
    (query, key, value), rest, _ = cache(1)
    with pytest.raises(ValueError, match="dense_decode: got query"):
        dense_decode(query, key, value[:, :, 1:], **rest, scale=SCALE)
    with pytest.raises(ValueError, match="dense_decode: got position float32"):
        dense_decode(query, key, value, position=rest["position"].astype(jnp.float32), limit=rest["limit"], scale=SCALE)
    with pytest.raises(ValueError, match="dense_decode: got dtypes .* expected the same dtype"):
        dense_decode(query.astype(jnp.bfloat16), key, value, **rest, scale=SCALE)
    with pytest.raises(ValueError, match="merge_splits: got out"):
        merge_splits(query, query)
    with pytest.raises(ValueError, match="merge_splits: got out bfloat16"):
        merge_splits(query.astype(jnp.bfloat16), jnp.zeros(query.shape[:3]))
    with pytest.raises(ValueError, match="got block=8, expected a power of two of at least 16"):
        pallas_triton.Config(block=8)
    with pytest.raises(ValueError, match="got splits=0, expected at least 1"):
        pallas_triton.Config(splits=0)


@NEEDS_GPU
def test_cudnn_agrees_where_nothing_is_missing():
    arrays, rest, _ = cache(3, slots=128, dtype="bfloat16", holes=0)
    arrays = [jnp.nan_to_num(x) for x in arrays]
    out, lse = jax.jit(functools.partial(cudnn.dense_decode, scale=SCALE))(*arrays, **rest)
    expected = dense_decode(*arrays, **rest, scale=SCALE, implementation="xla")
    close(out, np.asarray(expected[0], np.float64), "bfloat16")
    close(lse, np.asarray(expected[1], np.float64), "bfloat16")
