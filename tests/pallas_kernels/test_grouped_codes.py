"""Values in 4 bits with a scale for each of four groups of channels: the format, and operations that read and write it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.dense_decode import code_kernel as dense_code_kernel
from pallas_kernels.attend.dense_decode import pallas_triton as dense_kernel
from pallas_kernels.attend.gather_attention import code_kernel
from pallas_kernels.formats.mixing import block_of
from pallas_kernels.formats.quantised import Quantised, dequantise, quantise, unpack, vector_bytes, zeros
from pallas_kernels.host import Rows
from tests.pallas_kernels.cases import NAMES, SCALE, alike, close, compiled, implementations, softmax_attention
from tests.pallas_kernels.test_quantised import normal, soiled

CONFIG = dense_kernel.Config(block=16, splits=2)
KINDS = {"k8v4": (("int8", True, False), ("int4", True, True)), "plain": (("int4", False, False), ("int4", False, True))}
DENSE = implementations("dense_decode", config=CONFIG)
GATHER = implementations("gather_attention", config=CONFIG)
EVICT = implementations("evict_token")
coded = jax.jit(quantise, static_argnums=(1, 2, 3))
numbers = jax.jit(dequantise)


def numbers_of(x: Quantised):
    """The numbers of codes in float64, channel by channel, from the format's description alone."""
    raw, scale = np.asarray(x.codes, np.int64), np.asarray(x.scale, np.float64)
    half = raw.shape[-1]
    made = np.empty((*raw.shape[:-1], 2 * half))
    for channel in range(2 * half):
        nibble = raw[..., channel % half] >> (4 if channel >= half else 0) & 15
        made[..., channel] = (nibble - 16 * (nibble > 7)) * scale[..., 2 * (channel >= half) + channel % 2]
    if x.mixed:
        size = block_of(2 * half)
        matrix = np.ones((1, 1))
        while len(matrix) < size:
            matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        made = made @ np.kron(np.eye(2 * half // size), matrix / np.sqrt(size))
    return made


@functools.cache
def stored(kind, slots, dim, dtype="bfloat16"):
    """A key and a value as codes of a row of ``slots``, and their float64 numbers; channels of values differ in size."""
    drawn = np.random.default_rng(3).normal(size=(2, 2, 2, slots, dim))
    drawn[1] *= np.exp(np.sin(np.arange(dim)) - 1)
    pair = [coded(jnp.asarray(x, jnp.float32), *how) for x, how in zip(drawn, KINDS[kind], strict=True)]
    exact = np.asarray(numbers(pair[0]), np.float64), numbers_of(pair[1])
    return [dataclasses.replace(x, of=dtype) for x in pair], exact


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("dim", [8, 32, 80])
def test_each_group_has_a_scale_of_its_own(dim, mixed):
    x = normal(1, 30, dim).at[:, 1].mul(50)
    made = coded(x, "int4", mixed, True)
    assert made.grouped and made.scale.shape == (30, 4) and vector_bytes(made) == dim // 2 + 8
    np.testing.assert_allclose(dequantise(made), numbers_of(made), rtol=1e-5, atol=1e-4)
    if not mixed:  # a large channel decides the steps of its own group alone
        groups = np.asarray(x).reshape(30, 2, dim // 4, 2)
        step = np.abs(groups).max(axis=2, keepdims=True) / 7
        off = np.abs(np.asarray(dequantise(made)).reshape(groups.shape) - groups)
        assert np.all(off <= step * (0.5 * (1 + 2.0**-7) + 1e-5))


def test_what_has_no_groups_keeps_one_scale():
    """Half of 6 channels has more even than odd ones. Zeros stay zeros, and a NaN is seen in its group."""
    assert quantise(normal(1, 3, 6), "int4", False, True).scale.shape == (3,)
    assert zeros((3, 6), "float32", "int4", False, True).scale.shape == (3,)
    assert zeros((3, 8), "float32", "int4", False, True).scale.shape == (3, 4)
    bad = dequantise(quantise(jnp.zeros((8,)).at[2].set(jnp.nan), "int4", False, True))
    np.testing.assert_array_equal(bad, [np.nan, 0, np.nan, 0, 0, 0, 0, 0])


MORE = [("k8v4", 12, 128), ("plain", 1, 64), ("plain", 17, 256), ("k8v4", 17, 256)]
SHAPES = [
    ("k8v4", 3, 64, "bfloat16"),
    ("k8v4", 3, 32, "float32"),
    *(pytest.param(*x, "bfloat16", marks=pytest.mark.thorough) for x in MORE),
]
every_shape = pytest.mark.parametrize(("kind", "group", "dim", "dtype"), SHAPES)


@pytest.mark.parametrize("name", NAMES)
@every_shape
def test_dense_decode_equals_float64(name, kind, group, dim, dtype):
    slots = 37
    query = jnp.asarray(np.random.default_rng(2).normal(size=(2, 2, group, dim)), dtype)
    pair, exact = stored(kind, slots, dim, dtype)
    assert dense_code_kernel.takes(query, *pair) == (dtype == "bfloat16")
    position = np.where(np.random.default_rng(5).random((2, 2, slots)) < 0.3, -1, 7).astype(np.int32)
    limit = np.asarray([slots, 20], np.int32)
    seen = (position >= 0) & (np.arange(slots) < limit[:, None, None])
    pair = [soiled(x, jnp.asarray(~seen)) for x in pair]
    got = compiled(DENSE[name], scale=SCALE)(query, *pair, position=jnp.asarray(position), limit=jnp.asarray(limit))
    close(got, softmax_attention(query, *exact, seen[:, :, None])[:2], dtype)


@pytest.mark.parametrize("name", NAMES)
@every_shape
@pytest.mark.parametrize("page", [1, 4])
def test_gather_attention_equals_float64(name, kind, group, dim, dtype, page):
    slots, rng = 48, np.random.default_rng(6)
    query = jnp.asarray(np.random.default_rng(2).normal(size=(2, 2, group, dim)), dtype)
    pair, exact = stored(kind, slots, dim, dtype)
    assert code_kernel.takes(query, *pair, None, None) == (dtype == "bfloat16")
    listed = np.argsort(rng.random((2, 2, slots // page)), axis=-1)[..., : 28 // page].astype(np.int32)
    mask = rng.random(listed.shape) < 0.7
    mask[0, 1] = False
    position = np.where(rng.random((2, 2, slots)) < 0.2, -1, 3).astype(np.int32) if page > 1 else None
    seen = np.zeros((2, 2, slots), bool)
    for at in np.ndindex(2, 2):
        for item in listed[at][mask[at]]:
            seen[at][item * page : (item + 1) * page] = True
    seen &= True if position is None else position >= 0
    pair = [soiled(x, jnp.asarray(~seen)) for x in pair]
    rest = {} if position is None else {"position": jnp.asarray(position)}
    run = compiled(GATHER[name], scale=SCALE, page_size=page)
    got = run(query, *pair, jnp.asarray(listed), jnp.asarray(mask), **rest)
    close(got, softmax_attention(query, *exact, seen[:, :, None])[:2], dtype)


@pytest.mark.parametrize("name", NAMES)
def test_rows_in_host_memory_have_their_scales_on_the_device(name):
    slots, ring, dim = 24, 8, 32
    query = normal(2, 2, 2, 3, dim)
    (key, value), _ = stored("k8v4", slots, dim, "float32")
    listed = jnp.asarray(np.argsort(np.random.default_rng(6).random((2, 2, slots)), axis=-1)[..., :17], jnp.int32)
    mask = listed < slots - 3
    want = compiled(GATHER[name], scale=SCALE)(query, key, value, listed, mask)
    host = jax.device_put(jnp.concatenate([key.codes, value.codes], axis=3), jax.memory.Space.Host)
    near = [dataclasses.replace(x, codes=x.codes[:, :, slots - ring :]) for x in (key, value)]  # the newest slots
    rows = Rows(host=host, newest=jnp.full((2,), slots, jnp.int32), sinks=0)
    got = compiled(GATHER[name], scale=SCALE)(query, *near, listed, mask, rows=rows)
    alike(got, want)


def store(name, *args, **rest):
    """`store_token` of an implementation: keys and values."""
    stored = implementations("store_token")[name](*args, **rest)
    return stored.key, stored.value


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["k8v4", pytest.param("plain", marks=pytest.mark.thorough)])
def test_a_stored_token_has_four_scales(name, kind):
    slots, dim = 6, 32
    (key, value), _ = stored(kind, slots, dim, "float32")
    new = normal(7, 2, 2, dim).at[..., 3].mul(20), normal(8, 2, 2, dim).at[..., 5].mul(20)
    held = {"cache_position": jnp.zeros((2, 2, slots), jnp.int32), "cursor": jnp.asarray([2, slots], jnp.int32)}
    run = compiled(functools.partial(store, name))
    made = run(*new, jnp.asarray([5, 9], jnp.int32), cache_key=key, cache_value=value, **held)
    for got, x, before, how in zip(made, new, (key, value), KINDS[kind], strict=True):
        want = coded(x[0], *how)
        np.testing.assert_array_equal(got.scale[0, :, 2], want.scale)
        codes = [np.concatenate(unpack(y), -1) if got.packed else np.asarray(y) for y in (got.codes[0, :, 2], want.codes)]
        np.testing.assert_allclose(*codes, atol=1)  # one step, where the numbers differ in their last bit
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(before), strict=True):
            kept = np.ones((2, slots), bool)
            kept[0, 2] = False
            np.testing.assert_array_equal(np.asarray(a).swapaxes(1, 2)[kept], np.asarray(b).swapaxes(1, 2)[kept])


@pytest.mark.parametrize("name", NAMES)
def test_an_evicted_slot_gets_the_scales_of_the_newest_token(name):
    slots = 9
    pair, _ = stored("k8v4", slots, 16, "float32")
    position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (2, 2, slots))
    rest = position, jnp.asarray([slots, 3], jnp.int32), normal(5, 2, 2, slots)
    got = compiled(EVICT[name], budget=5)(*pair, *rest)
    want = compiled(EVICT["xla"], budget=5)(*map(numbers, pair), *rest)
    alike([*map(numbers, got[:2])], want[:2])
