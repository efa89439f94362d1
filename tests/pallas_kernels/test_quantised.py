"""The formats of codes: kinds, a scale or four, vectors that are mixed before they are rounded; how numbers read back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.mixing import block_of, mix, mix_few, signs
from pallas_kernels.formats.quantised import MOST, Quantised, dequantise, quantise, vector_bytes, zeros

coded, numbers = jax.jit(quantise, static_argnums=(1, 2, 3)), jax.jit(dequantise)
every_kind = pytest.mark.parametrize("kind", MOST)


def normal(seed, *shape, dtype="float32", large=1):
    """Random numbers; vectors differ much in length, and channel 1 is ``large``."""
    rng = np.random.default_rng(seed)
    x = np.exp(rng.normal(size=(*shape[:-1], 1))) * rng.normal(size=shape)
    x[..., 1] *= large
    return jnp.asarray(x, dtype)


def levels_of(x: Quantised):
    """The codes in float64, channel by channel, from the format's description alone."""
    if not x.packed:
        return np.asarray(x.codes).astype(np.float64)
    channel, half = np.arange(x.shape[-1]), x.codes.shape[-1]
    nibble = np.asarray(x.codes, np.int64)[..., channel % half] >> np.where(channel < half, 0, 4) & 15
    return (nibble - 16 * (nibble > 7)).astype(np.float64)


def numbers_of(x: Quantised):
    """The numbers of codes in float64, from the format's description alone."""
    dim, scale = x.shape[-1], np.asarray(x.scale, np.float64)
    channel = np.arange(dim)
    numbers = levels_of(x) * (scale[..., 2 * (channel >= dim // 2) + channel % 2] if x.grouped else scale[..., None])
    if not x.mixed:
        return numbers
    matrix = np.ones((1, 1))
    while len(matrix) < (dim & -dim):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return numbers @ np.kron(np.eye(dim // len(matrix)), matrix / np.sqrt(len(matrix)))


@every_kind
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_number_reads_back_within_half_a_step(kind, size):
    x = normal(1, 50, 16) * size
    made = coded(x, kind)
    assert made.codes.dtype == ("int8" if kind == "int4" else kind) and made.scale.dtype == jnp.bfloat16
    assert (made.kind, made.shape) == (kind, x.shape) and made.codes.shape[1] == (8 if kind == "int4" else 16)
    largest = np.abs(x).max(axis=1, keepdims=True)
    # A scale is rounded up by 2^-7 at most. A step of float8 is an eighth of a number's power of two.
    step = np.maximum(np.abs(x) / 8, largest / 448 / 512) if kind == "float8_e4m3fn" else largest / MOST[kind]
    assert np.all(np.abs(numbers(made) - x) <= step * (0.5 * (1 + 2.0**-7) + 1e-5))
    np.testing.assert_allclose(numbers(made), numbers_of(made), rtol=1e-6)


@every_kind
def test_what_no_code_can_hold(kind):
    """Zeros stay zeros, a number larger than any code is not clipped, and a NaN is not hidden."""
    rows = jnp.asarray([[0.0, 0.0], [1e38, -1.0], [jnp.nan, 1.0]])
    zero, large, bad = np.asarray(numbers(coded(rows, kind)))
    assert not zero.any() and abs(large[0] / 1e38 - 1) < 0.04 and np.isnan(bad).all()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dim", [8, 32, 80])
def test_each_group_has_a_scale_of_its_own(dim, mixed):
    x = normal(1, 30, dim, large=50)
    made = coded(x, "int4", mixed, True)
    assert made.grouped and made.scale.shape == (30, 4) and vector_bytes(made) == dim // 2 + 8
    np.testing.assert_allclose(numbers(made), numbers_of(made), rtol=1e-5, atol=1e-4)
    if not mixed:  # a large channel decides the steps of its own group alone
        groups = np.asarray(x).reshape(30, 2, dim // 4, 2)
        step = np.abs(groups).max(axis=2, keepdims=True) / 7
        off = np.abs(np.asarray(numbers(made)).reshape(groups.shape) - groups)
        assert np.all(off <= step * (0.5 * (1 + 2.0**-7) + 1e-5))


def test_what_has_no_groups_keeps_one_scale():
    """Half of 6 channels has more even than odd ones. Zeros stay zeros, and a NaN is seen in its group."""
    assert coded(normal(1, 3, 6), "int4", False, True).scale.shape == (3,)
    assert zeros((3, 6), "float32", "int4", False, True).scale.shape == (3,)
    assert zeros((3, 8), "float32", "int4", False, True).scale.shape == (3, 4)
    bad = numbers(coded(jnp.asarray([0, 0, np.nan, 0, 0, 0, 0, 0], jnp.float32), "int4", False, True))
    np.testing.assert_array_equal(bad, [np.nan, 0, np.nan, 0, 0, 0, 0, 0])


@pytest.mark.parametrize("dim", [64, 96, 80])
def test_mixing_is_a_rotation_of_its_own_inverse(dim):
    x, size = normal(0, 3, dim), block_of(dim)
    assert (dim, size) in ((64, 64), (96, 32), (80, 16))
    mixed = jax.jit(mix)(x)
    np.testing.assert_allclose(np.linalg.norm(mixed, axis=1), np.linalg.norm(x, axis=1), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(mix)(mixed), x, atol=1e-5)
    matrix = np.kron(np.eye(dim // size), np.asarray(signs(size), np.float64) / np.sqrt(size))
    for run in (mix, mix_few):
        np.testing.assert_allclose(jax.jit(run)(x), np.asarray(x, np.float64) @ matrix, atol=1e-5)
    np.testing.assert_array_equal(jax.jit(mix)(x[1:2])[0], mixed[1])  # as alone
    assert jax.eval_shape(mix_few, x.astype("bfloat16")).dtype == jnp.bfloat16


def test_a_large_channel_no_longer_decides_the_steps_of_the_others():
    x = np.random.default_rng(0).normal(size=(50, 64)).astype(np.float32)
    x[:, 3] = 40
    plain, mixed = (np.asarray(numbers(coded(jnp.asarray(x), "int4", how))) - x for how in (False, True))
    assert np.abs(np.delete(mixed, 3, 1)).mean() < 0.65 * np.abs(np.delete(plain, 3, 1)).mean()
