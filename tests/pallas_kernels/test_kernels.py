"""Dense attention against float64 NumPy, and the rules of dispatch; other kernels have files of their own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.causal_attention import CAUSAL_ATTENTION, causal_attention
from pallas_kernels.causal_attention import reference as causal
from pallas_kernels.column_mass import column_mass
from pallas_kernels.dense_attention import dense_attention
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.numerics import merge_partials

ON_GPU = jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason=f"needs a GPU, got {jax.default_backend()}")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
SCALE = 0.11


def softmax_attention(query, key, value, seen, bias=0.0):
    """Float64: query [..., M, D], key, value [..., N, D], seen [..., M, N] -> out, lse, probabilities."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.where(seen, SCALE * query @ np.nan_to_num(key).swapaxes(-1, -2) + bias, -np.inf)
    peak = np.max(logits, axis=-1, keepdims=True, initial=-1e30)
    weight = np.exp(logits - peak)
    total = weight.sum(-1, keepdims=True)
    chance = weight / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return chance @ np.nan_to_num(value), (peak + np.log(total))[..., 0], chance


def close(got, expected, dtype):
    got = np.asarray(got, np.float64)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def cache(seed, group=4, dim=64, length=5, slots=50, dtype="float32", rows=2, heads=2):
    """Random queries and a cache with holes, its slots in no order; empty slots hold NaN."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, heads, group, length, dim)).astype(np.float32)
    key, value = rng.normal(size=(2, rows, heads, slots, dim)).astype(np.float32)
    position = np.argsort(rng.random((rows, heads, slots)), axis=-1).astype(np.int32)
    position[rng.random(position.shape) < 0.3] = -1
    position[0, 1] = -1  # an empty cache
    asked = np.sort(rng.integers(0, slots, (rows, length)), axis=-1).astype(np.int32)
    asked[1, 0] = -1  # a padding query
    key[position < 0], value[position < 0] = np.nan, np.nan
    arrays = [jnp.asarray(x, dtype) for x in (query, key, value)]
    return arrays, {"query_position": jnp.asarray(asked), "key_position": jnp.asarray(position)}


def dense_oracle(query, key, value, query_position, key_position):
    asked, held = (
        np.asarray(query_position)[:, None, None, :, None],
        np.asarray(key_position)[:, :, None, None],
    )
    seen = np.broadcast_to((held >= 0) & (held <= asked), (*query.shape[:4], key.shape[2]))
    query, key, value = (np.asarray(x, np.float32) for x in (query, key[:, :, None], value[:, :, None]))
    return softmax_attention(query, key, value, seen)


@pytest.mark.parametrize("block", [7, 1024])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("group", "dim", "length"), [(1, 64, 1), (4, 128, 5)])
def test_dense_attention_and_column_mass(block, dtype, group, dim, length):
    (query, key, value), positions = cache(group, group, dim, length, dtype=dtype)
    expected = dense_oracle(query, key, value, **positions)
    run = jax.jit(functools.partial(dense_attention, scale=SCALE, block=block))
    out, lse = run(query, key, value, **positions)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    close(out, expected[0], dtype)
    close(lse, expected[1], dtype)
    assert not np.any(out[0, 1]) and not np.any(out[1, :, :, 0])
    mass = jax.jit(functools.partial(column_mass, scale=SCALE, block=block))(query, key, lse, **positions)
    assert mass.dtype == jnp.float32
    close(mass, expected[2].sum((2, 3)), dtype)


@pytest.mark.parametrize("limit", [0, 16, 20, 50])
def test_dense_attention_limit_hides_nothing_and_skips_the_rest(limit):
    (query, key, value), positions = cache(7)
    positions["key_position"] = jnp.where(jnp.arange(50)[None, None] < limit, positions["key_position"], -1)
    run = jax.jit(functools.partial(dense_attention, scale=SCALE, block=16))
    plain = run(query, key, value, **positions)
    bounded = run(query, key, value, **positions, limit=jnp.int32(limit))
    for a, b in zip(plain, bounded):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
    if limit == 16:  # a limit that lies skips whole blocks: the loop really stops there
        (_, _, _), full = cache(7)
        early = run(query, key, value, **full, limit=jnp.int32(limit))
        for a, b in zip(plain, early):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_dense_attention_prefix_chunks_skip_the_future():
    """Whole blocks in the future are never read, so NaN in the values there changes nothing."""
    (query, key, value), positions = cache(8, slots=64)
    positions["key_position"] = jnp.broadcast_to(jnp.arange(64), (2, 2, 64))
    positions["query_position"] = jnp.broadcast_to(jnp.arange(10, 15), (2, 5))
    key, value = jnp.nan_to_num(key), jnp.nan_to_num(value).at[:, :, 16:].set(jnp.nan)
    out, _ = dense_attention(query, key, value, **positions, scale=SCALE, block=16)
    close(out, dense_oracle(query, key, value, **positions)[0], "float32")


def test_dense_attention_vmap():
    pairs = [cache(seed) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *pairs)
    fn = functools.partial(dense_attention, scale=SCALE, block=16)
    together = jax.vmap(lambda arrays, positions: fn(*arrays, **positions))(*stacked)
    for i, (arrays, positions) in enumerate(pairs):
        for a, b in zip(fn(*arrays, **positions), together):
            np.testing.assert_allclose(a, b[i], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocked", [False, True])
def test_causal_attention(dtype, blocked, monkeypatch):
    if blocked:
        monkeypatch.setattr(causal, "WHOLE", 8)
        monkeypatch.setattr(causal, "BLOCK", 16)
    (query, key, value), _ = cache(9, length=37, slots=37, dtype=dtype)
    key, value = jnp.nan_to_num(key), jnp.nan_to_num(value)
    run = functools.partial(causal_attention, scale=SCALE, implementation="xla")
    position = np.broadcast_to(np.arange(37), (2, 2, 37))
    expected = dense_oracle(query, key, value, position[:, 0], position)[0]
    close(jax.jit(run)(query, key, value), expected, dtype)
    # The gradient, along one random direction, is the slope of the oracle.
    if dtype == "float32":
        rng = np.random.default_rng(0)
        step = [rng.normal(size=x.shape).astype(np.float32) for x in (query, key, value)]
        aim = rng.normal(size=query.shape).astype(np.float32)
        grads = jax.jit(jax.grad(lambda *x: jnp.sum(run(*x) * aim), argnums=(0, 1, 2)))(query, key, value)
        slope = sum(np.sum(np.float64(g) * s) for g, s in zip(grads, step))
        sides = [
            dense_oracle(*(np.float64(x) + e * s for x, s in zip((query, key, value), step)), position[:, 0], position)
            for e in (1e-3, -1e-3)
        ]
        numeric = np.sum((sides[0][0] - sides[1][0]) * aim) / 2e-3
        np.testing.assert_allclose(slope, numeric, rtol=1e-3)


def test_unknown_and_impossible_implementations():
    short = jnp.zeros((1, 1, 1, 4, 64), jnp.bfloat16)
    run = functools.partial(causal_attention, short, short[:, :, 0], short[:, :, 0])
    with pytest.raises(ValueError, match=r"implementation='fast' is unknown, expected one of \['cudnn', 'xla'\]"):
        run(implementation="fast")
    with pytest.raises(NotImplementedError, match=r"needs a platform in \('gpu',\) \(got platform='cpu'\)"):
        run(implementation="cudnn", platform="cpu")
    long = jnp.zeros((1, 1, 1, 4, 192), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="got head_dim 192, expected a multiple of 8 up to 128"):
        causal_attention(long, long[:, :, 0], long[:, :, 0], implementation="cudnn", platform="gpu")
    small = long[..., :64].astype(jnp.float32)
    with pytest.raises(NotImplementedError, match="got dtypes .'float32'., expected all bfloat16 or all float16"):
        causal_attention(small, small[:, :, 0], small[:, :, 0], implementation="cudnn", platform="gpu")


def test_without_cudnn_the_next_implementation_runs(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    query = jnp.ones((1, 1, 1, 4, 64), jnp.bfloat16)
    args = query, query[:, :, 0], query[:, :, 0]
    np.testing.assert_array_equal(causal_attention(*args, platform="gpu"), query)
    with pytest.raises(NotImplementedError, match="got cuDNN is not detected., expected an installed cuDNN"):
        causal_attention(*args, platform="gpu", implementation="cudnn")


@pytest.mark.parametrize(
    ("platform", "dtype", "dim", "whole"),
    [
        ("cpu", "bfloat16", 64, "xla"),
        ("tpu", "bfloat16", 64, "xla"),
        ("gpu", "bfloat16", 64, "cudnn"),
        ("gpu", "float32", 64, "xla"),
        ("gpu", "bfloat16", 80, "cudnn"),
    ],
)
def test_resolve_from_shapes_alone(platform, dtype, dim, whole):
    rows = jax.ShapeDtypeStruct((1, 2, 32, dim), dtype)
    query = jax.ShapeDtypeStruct((1, 2, 4, 32, dim), dtype)
    assert CAUSAL_ATTENTION.resolve(query, rows, rows, scale=SCALE, platform=platform) == whole


def test_dispatch_goes_on_and_reports_every_failure():
    def cannot(x):
        raise NotImplementedError(f"got {x}, expected 0")

    def broken(x):
        raise ValueError("a bug is not a reason to go on")

    falls_through = Operation("op", {"a": Implementation(cannot), "xla": Implementation(lambda x: x + 1)})
    assert falls_through.run(1) == 2
    with pytest.raises(NotImplementedError, match="op: 'a' cannot run: got 1, expected 0"):
        falls_through.run(1, implementation="a")
    none = Operation("op", {"a": Implementation(cannot), "b": Implementation(cannot, ("tpu",))})
    with pytest.raises(ExceptionGroup, match="op: no implementation can run on platform='cpu'") as caught:
        none.run(1, platform="cpu")
    assert len(caught.value.exceptions) == 2
    with pytest.raises(ValueError, match="a bug"):
        Operation("op", {"a": Implementation(broken), "xla": Implementation(cannot)}).run(1)


def test_bad_arguments():
    (query, key, value), positions = cache(1)
    with pytest.raises(ValueError, match="dense_attention: got query"):
        dense_attention(query, key[..., 1:], value, **positions, scale=SCALE)
    with pytest.raises(ValueError, match="dense_attention: got value"):
        dense_attention(query, key, value[..., 1:], **positions, scale=SCALE)
    with pytest.raises(ValueError, match="got query bfloat16 and key float32, expected the same dtype"):
        dense_attention(query.astype(jnp.bfloat16), key, value, **positions, scale=SCALE)
    with pytest.raises(ValueError, match="causal_attention: got dtypes .* expected the same dtype"):
        causal_attention(query, *(x[:, :, :5].astype(jnp.bfloat16) for x in (key, value)))
    with pytest.raises(ValueError, match="got block=0, expected at least 1 slot"):
        dense_attention(query, key, value, **positions, scale=SCALE, block=0)
    with pytest.raises(ValueError, match="column_mass: got lse"):
        column_mass(query, key, query, **positions, scale=SCALE)
    with pytest.raises(ValueError, match="causal_attention: got query"):
        causal_attention(query, key, value)
    with pytest.raises(ValueError, match="merge_partials: got out"):
        merge_partials(query, key)


@NEEDS_GPU
def test_cudnn_is_in_the_compiled_program_and_agrees():
    (query, key, value), _ = cache(9, length=64, slots=64, dtype="bfloat16")
    args = query, jnp.nan_to_num(key), jnp.nan_to_num(value)
    run = jax.jit(functools.partial(causal_attention, implementation="cudnn"))
    assert "__cudnn$fmha" in run.lower(*args).compile().as_text()
    close(run(*args), np.asarray(causal_attention(*args, implementation="xla"), np.float64), "bfloat16")
