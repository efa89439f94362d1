"""Causal attention of whole sequences, and its gradient, against float64 NumPy; cuDNN where there is a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.causal_attention import causal_attention, pallas_mosaic_gpu
from pallas_kernels.attend.causal_attention import reference as causal
from tests.pallas_kernels.attend.test_mosaic_gpu import lowered
from tests.pallas_kernels.cases import NEEDS_GPU, ON_HOPPER, SCALE, close, dense_oracle, positioned_cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("blocked", [False, True])
def test_attention_and_gradient_equal_float64(dtype, blocked, monkeypatch):
    if blocked:
        monkeypatch.setattr(causal, "BLOCK", 16)
    (query, key, value), _ = positioned_cache(9, length=37, slots=37, dtype=dtype)
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


@pytest.mark.parametrize("blocked", [False, True])
def test_a_window_hides_all_but_the_newest_tokens(blocked, monkeypatch):
    if blocked:
        monkeypatch.setattr(causal, "BLOCK", 16)
    rng = np.random.default_rng(0)
    query, key, value = (rng.normal(size=(1, 1, *more, 20, 8)).astype(np.float32) for more in ((2,), (), ()))
    run = functools.partial(causal_attention, query, key, value, implementation="xla")
    logits = np.einsum("bhgtd,bhsd->bhgts", np.float64(query), key) / np.sqrt(8)
    distance = np.arange(20)[:, None] - np.arange(20)[None]
    weight = np.where((distance >= 0) & (distance < 3), np.exp(logits), 0)
    want = np.einsum("bhgts,bhsd->bhgtd", weight / weight.sum(axis=-1, keepdims=True), value)
    np.testing.assert_allclose(run(window=3), want, atol=1e-5)
    np.testing.assert_array_equal(run(window=20), run())


def test_without_cudnn_the_next_implementation_runs(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", missing)
    query = jnp.ones((1, 1, 1, 4, 64), jnp.bfloat16)
    args = query, query[:, :, 0], query[:, :, 0]
    np.testing.assert_array_equal(causal_attention(*args, platform="gpu"), query)
    with pytest.raises(NotImplementedError, match="got cuDNN is not detected., expected an installed cuDNN"):
        causal_attention(*args, platform="gpu", implementation="cudnn")


@NEEDS_GPU
def test_cudnn_is_in_the_compiled_program_and_agrees():
    (query, key, value), _ = positioned_cache(9, length=64, slots=64, dtype="bfloat16")
    args = query, jnp.nan_to_num(key), jnp.nan_to_num(value)
    run = jax.jit(functools.partial(causal_attention, implementation="cudnn"))
    assert "__cudnn$fmha" in run.lower(*args).compile().as_text()
    close(run(*args), np.asarray(causal_attention(*args, implementation="xla"), np.float64), "bfloat16")


@ON_HOPPER
@pytest.mark.parametrize("tokens", [38, 700])
def test_a_hopper_gpu_computes_it_and_takes_the_gradient_of_cudnn(tokens):
    (query, key, value), _ = positioned_cache(9, dim=128, length=tokens, slots=tokens, dtype="bfloat16")
    args = query, jnp.nan_to_num(key), jnp.nan_to_num(value)
    position = np.broadcast_to(np.arange(tokens), (2, 2, tokens))
    run = functools.partial(causal_attention, scale=SCALE)
    close(jax.jit(run)(*args), dense_oracle(*args, position[:, 0], position)[0], "bfloat16")
    pulled = [jax.vjp(functools.partial(run, implementation=x), *args)[1](query) for x in ("pallas_mosaic_gpu", "cudnn")]
    for one, other in zip(*pulled, strict=True):
        np.testing.assert_array_equal(one, other)


def test_it_lowers_for_an_h100():
    arrays = [jax.ShapeDtypeStruct((1, 2, *lead, 203, 128), "bfloat16") for lead in ((3,), (), ())]
    assert lowered(functools.partial(pallas_mosaic_gpu.causal_attention, scale=SCALE, window=None), *arrays) == 1
