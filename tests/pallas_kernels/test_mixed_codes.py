"""Codes of channels that were mixed before they were rounded, and the operations on them, against dequantised rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_decode import DENSE_DECODE, Rotation, dense_decode
from pallas_kernels.attend.gather_attention import GATHER_ATTENTION, gather_attention
from pallas_kernels.formats.mixing import block_of, mix, mix_few, signs
from pallas_kernels.formats.quantised import Quantised, quantise, whole
from pallas_kernels.machine import assume_machine
from tests.pallas_kernels.cases import SCALE, close

INV_FREQ = jnp.asarray(10.0 ** -np.arange(16), jnp.float32)


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def cache(slots=40):
    """A key and a value with a large channel each, in 8 and in 4 bits."""
    rows = (normal(i, 2, 2, slots, 32).at[..., 3].mul(9) for i in (1, 2))
    return tuple(quantise(x, kind, True) for x, kind in zip(rows, ("int8", "int4"), strict=True))


@pytest.mark.parametrize("dim", [64, 96, 80])
def test_mixing_is_a_rotation_of_its_own_inverse(dim):
    x, size = normal(0, 3, dim), block_of(dim)
    assert (dim, size) in ((64, 64), (96, 32), (80, 16))
    mixed = mix(x)
    np.testing.assert_allclose(np.linalg.norm(mixed, axis=1), np.linalg.norm(x, axis=1), rtol=1e-6)
    np.testing.assert_allclose(mix(mixed), x, atol=1e-6)
    matrix = np.kron(np.eye(dim // size), np.asarray(signs(size), np.float64) / np.sqrt(size))
    for run in (mix, mix_few):
        np.testing.assert_allclose(run(x), np.asarray(x, np.float64) @ matrix, atol=1e-6)
    np.testing.assert_array_equal(jax.jit(mix)(x[1:2])[0], jax.jit(mix)(x)[1])  # as alone
    assert mix_few(x.astype("bfloat16")).dtype == jnp.bfloat16


def test_a_large_channel_no_longer_decides_the_steps_of_the_others():
    x = normal(0, 50, 64).at[:, 3].set(40)
    plain, mixed = (np.asarray(whole(quantise(x, "int4", how)) - x) for how in (False, True))
    assert np.abs(np.delete(mixed, 3, 1)).mean() < 0.65 * np.abs(np.delete(plain, 3, 1)).mean()


@pytest.mark.parametrize("more", ["nothing", "partials", "rotation"])
def test_dense_decode_mixes_the_query_and_what_comes_out(more):
    key, value = cache()
    query, rest = normal(3, 2, 2, 3, 32), {}
    if more == "partials":
        rest = {"partials": (normal(4, 2, 2, 3, 32), normal(5, 2, 2, 3))}
    if more == "rotation":
        rest = {"rotation": Rotation(INV_FREQ, jnp.asarray([[0, 9], [0, 5]], jnp.int32), 4)}
    rest["position"] = jnp.broadcast_to(jnp.arange(40, dtype=jnp.int32), (2, 2, 40))
    rest["limit"] = jnp.asarray([40, 9], jnp.int32)
    got = dense_decode(query, key, value, **rest, scale=SCALE)
    want = dense_decode(query, whole(key), whole(value), **rest, scale=SCALE)
    close(got, want, "float32")


@pytest.mark.parametrize("more", ["nothing", "partials", "place"])
def test_gather_attention_mixes_the_query_and_what_comes_out(more):
    key, value = cache()
    query, slots = normal(3, 2, 2, 3, 32), jnp.asarray(np.random.default_rng(6).integers(0, 40, (2, 2, 9)), jnp.int32)
    rest = {"nothing": {}, "partials": {"partials": (normal(4, 2, 2, 1, 3, 32), normal(5, 2, 2, 1, 3))}}
    rest = rest.get(more, {"place": slots, "inv_freq": INV_FREQ})
    arguments = slots, jnp.ones(slots.shape, bool)
    got = gather_attention(query, key, value, *arguments, **rest, scale=SCALE)
    want = gather_attention(query, whole(key), whole(value), *arguments, **rest, scale=SCALE)
    close(got, want, "float32")


def test_kernels_that_rotate_keys_leave_mixed_codes_to_plain_jax():
    shape = jax.ShapeDtypeStruct
    query, scale = shape((1, 2, 4, 64), "bfloat16"), shape((1, 2, 32), "bfloat16")
    lists = shape((1, 2, 8), "int32"), shape((1, 2, 8), bool)
    rest = {"position": shape((1, 2, 32), "int32"), "limit": shape((1,), "int32"), "scale": SCALE}
    rotation = Rotation(shape((32,), "float32"), shape((1, 2), "int32"), 4)
    for mixed, expected in ((True, "xla"), (False, "pallas_triton")):
        codes = Quantised(codes=shape((1, 2, 32, 32), "int8"), scale=scale, of="bfloat16", packed=True, mixed=mixed)
        with assume_machine("gpu", (9, 0)):
            assert DENSE_DECODE.resolve(query, codes, codes, **rest, rotation=rotation) == expected
            placed = {"place": lists[0], "inv_freq": shape((32,), "float32"), "scale": SCALE}
            assert GATHER_ATTENTION.resolve(query, codes, codes, *lists, **placed) == expected
