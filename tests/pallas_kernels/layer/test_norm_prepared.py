"""The prepared norm against `add_norm` and against the product with codes that does without preparation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.prepared import Prepared
from pallas_kernels.layer.add_norm import add_norm
from pallas_kernels.layer.coded_product import pallas_triton as product
from pallas_kernels.layer.coded_product.integers import integers_of
from pallas_kernels.layer.norm_prepared import NORM_PREPARED, norm_prepared, pallas_triton
from tests.pallas_kernels.cases import compiled, every_body, one_shape
from tests.pallas_kernels.layer.test_coded_product import draw

EPS = 1e-3
RUN = {
    "xla": functools.partial(norm_prepared, eps=EPS, implementation="xla"),
    "interpreted": functools.partial(pallas_triton.norm_prepared, eps=EPS, interpret=True),
    "pallas_triton": functools.partial(norm_prepared, eps=EPS, implementation="pallas_triton"),
}


def rows(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.bfloat16)


def numbers(prepared: Prepared, bits: int) -> np.ndarray:
    """The numbers that integers and units spell, float64 [B, K], by the order in which the format says codes lie."""
    pairs, pieces = (np.asarray(x, np.float64 if x.dtype == jnp.float32 else np.int64) for x in prepared.integers(bits))
    found = np.zeros((len(pairs), pairs.shape[2] * 32 // bits))
    for number in range(found.shape[1]):
        chunk, place = divmod(number, 64)
        byte, plane = (chunk * 32 + place % 32, 2 * (place // 32)) if bits == 4 else (number, 0)
        word, part = divmod(byte, 4)
        pair = pairs[:, plane + part // 2, word]
        integer = (pair >> 16) if part % 2 else ((pair & 0xFFFF) ^ 0x8000) - 0x8000
        found[:, number] = integer * pieces[:, 0, word // 4]
    return found


@every_body
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [[1, 2, 192], *one_shape([4, 64], [1, 1, 4096])])
def test_sum_and_norm_are_those_of_add_norm_and_integers_spell_the_norm(name, bits, shape):
    x, update, scale = rows(*shape), rows(*shape, seed=1), rows(shape[-1], seed=2)
    after, prepared = compiled(RUN[name], bits=bits)(x, update, scale)
    total, normed = add_norm(x, update, scale, EPS, "xla")
    np.testing.assert_array_equal(after, total)
    np.testing.assert_allclose(*(np.asarray(a, np.float64) for a in (prepared.x, normed)), rtol=2**-7, atol=1e-6)
    if name == "xla":
        assert prepared.integers(bits) is None
        return
    assert prepared.integers(12 - bits) is None
    exact = np.asarray(prepared.x, np.float64).reshape(-1, shape[-1])
    assert np.abs(numbers(prepared, bits) - exact).max() <= 2.0**-15 * np.abs(exact).max()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_product_with_prepared_vectors_is_the_product_with_the_vectors(bits):
    """Bit for bit: both kernels write the same integers. A row with NaN is NaN, and other rows do not see it."""
    x, update, scale = rows(3, 192), rows(3, 192, seed=1).at[1, 7].set(jnp.nan), rows(192, seed=2)
    _, prepared = compiled(RUN["interpreted"], bits=bits)(x, update, scale)
    plain = compiled(integers_of, bits=bits, interpret=True)(prepared.x)
    for mine, theirs in zip(prepared.integers(bits), plain, strict=True):
        np.testing.assert_array_equal(mine[::2], theirs[::2])
    matrix, _, _ = draw(f"{bits} bits", 12, 192)
    run = functools.partial(product.coded_product, gated=False, dtype=jnp.float32, interpret=True)
    made = jax.jit(run)(prepared.x, matrix, integers=prepared.integers(bits))
    assert np.isnan(made[1]).all() and np.isfinite(made[::2]).all()


def test_wrong_arguments_are_refused_and_shapes_choose_the_implementation():
    x = rows(2, 64)
    with pytest.raises(ValueError, match=r"scale \(64,\), 6 bits, expected an update like x, a scale of \(64,\), and 8 or 4"):
        norm_prepared(x, x, x[0], eps=EPS, bits=6)
    like = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    for shape, chosen in (((1, 1, 4096), "pallas_triton"), ((5, 4096), "xla"), ((1, 96), "xla"), ((1, 32768), "xla")):
        given = like(shape), like(shape), like(shape[-1:])
        assert NORM_PREPARED.resolve(*given, eps=EPS, bits=4, platform="gpu") == chosen
