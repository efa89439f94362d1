"""Codes of keys and the index kept of them, every implementation against the plain one and against rebuilding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.encode import encode
from pallas_kernels.encode import pallas_triton as pallas_codes
from pallas_kernels.formats.key_codes import cluster_counts as histogram
from pallas_kernels.formats.key_codes import parts_of_rows
from pallas_kernels.store_codes import STORE_CODES, store_codes
from pallas_kernels.store_codes import pallas_triton as pallas_store
from tests.oracles import pariskv as plain

ON_GPU = jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason=f"needs a GPU, got {jax.default_backend()}")
NAMES = ["xla", "interpreted", pytest.param("pallas_triton", marks=NEEDS_GPU)]
LOCAL, BUFFER = 4, 3

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]


def run(name, dim, rotate=True, part=4):
    scale = dim**-0.5 if rotate else 1.0
    if name == "interpreted":
        return jax.jit(
            functools.partial(pallas_codes.encode, scale=scale, config=pallas_codes.Config(part), interpret=True)
        )
    return jax.jit(functools.partial(encode, scale=scale, implementation=name))


def keys(seed, dim, tokens=11, rows=2, heads=2):
    """Keys of very different length, a zero key, and NaN where nothing is valid."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(rows, heads, tokens, dim)) * 10.0 ** rng.uniform(-3, 3, (rows, heads, tokens, 1))
    valid = rng.random((rows, heads, tokens)) < 0.8
    key[0, 0, 1], valid[0, 0, 1] = 0, True
    return np.where(valid[..., None], key, np.nan).astype(np.float32), valid


def signs_of(dim, rotate=True):
    return jnp.asarray(plain.random_signs(dim), jnp.float32) if rotate else None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dim", "rotate"), [(16, True), (128, True), (64, False)])
def test_codes_are_the_oracles(name, dim, rotate):
    key, valid = keys(dim, dim)
    ids, rows = run(name, dim, rotate)(jnp.asarray(key), jnp.asarray(valid), signs_of(dim, rotate))
    assert ids.dtype == rows.dtype == jnp.uint8 and rows.shape == key.shape
    magnitudes, weight = parts_of_rows(rows)
    assert not np.any(np.asarray(rows).reshape(*valid.shape, -1, 8)[..., 6:])
    matrix = plain.hadamard(dim)
    for at in np.ndindex(valid.shape):
        if not valid[at]:
            assert not np.any(ids[at]) and not np.any(magnitudes[at]) and not np.any(weight[at])
            continue
        want = plain.encode(key[at], plain.random_signs(dim), matrix, rotate=rotate)
        nibble = (want.level + 8 * want.sign).reshape(-1)
        np.testing.assert_array_equal(ids[at], want.ids)
        np.testing.assert_array_equal(magnitudes[at], nibble[0::2] | nibble[1::2] << 4)
        np.testing.assert_allclose(np.asarray(weight[at], np.float64), want.weight, rtol=2**-7)


@pytest.mark.parametrize("name", NAMES)
def test_codes_do_not_depend_on_the_batch(name):
    """To the last bit, alone or among others, whichever block they fall into."""
    key, valid = keys(3, 32)
    valid[:] = True
    key = jnp.nan_to_num(jnp.asarray(key))
    whole = run(name, 32)(key, jnp.asarray(valid), signs_of(32))
    for part, (start, stop) in ((1, (4, 5)), (8, (3, 10))):
        some = run(name, 32, part=part)(key[:, :, start:stop], jnp.asarray(valid[:, :1, start:stop]), signs_of(32))
        for a, b in zip(some, whole):
            np.testing.assert_array_equal(a, b[:, :, start:stop])


def test_both_implementations_agree_to_the_bit_where_divisions_do():
    """Interpreted, divisions are those of the plain version, so everything must be equal."""
    key, valid = keys(5, 64)
    args = jnp.asarray(key), jnp.asarray(valid), signs_of(64)
    for a, b in zip(run("xla", 64)(*args), run("interpreted", 64)(*args)):
        np.testing.assert_array_equal(a, b)


def storing(name, dim, rotate=True):
    fixed = {"num_local": LOCAL, "buffer": BUFFER, "scale": dim**-0.5 if rotate else 1.0}
    if name == "interpreted":
        return jax.jit(functools.partial(pallas_store.store_codes, **fixed, interpret=True))
    return jax.jit(functools.partial(store_codes, **fixed, implementation=name))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("heads", "rotate"), [(2, True), (3, False)])
def test_index_kept_step_by_step_is_the_index_rebuilt(name, heads, rotate):
    """Rows that grow at their own pace, one with empty slots; the state before each step is garbage where nothing is."""
    dim, slots, steps = 16, 40, 16
    key, valid = keys(7, dim, slots, heads=heads)
    valid[0] = True
    key = jnp.nan_to_num(jnp.asarray(key))
    rng = np.random.default_rng(0)
    cursor, stop = np.array([11, 13]), np.array([5, 9])  # sinks, then whatever has left the local window: 7 and 9
    counted = np.maximum(cursor - LOCAL, stop)
    make = run("xla" if name == "interpreted" else name, dim, rotate)
    codes = make(key, jnp.asarray(valid), signs_of(dim, rotate))
    written = np.arange(slots) < cursor[:, None]
    index = [jnp.where(written[:, None, :, None], x, jnp.zeros_like(x)) for x in codes]

    def count(low, high):
        live = valid & (np.arange(slots) >= low[:, None, None]) & (np.arange(slots) < high[:, None, None])
        return histogram(codes[0], jnp.asarray(live))

    state = (*index, count(np.array([2, 2]), stop), count(stop, counted), jnp.asarray(stop, jnp.int32))
    step = storing(name, dim, rotate)
    for _ in range(steps):
        active = rng.random(2) < 0.8
        cursor = cursor + active
        position = np.where(valid & (np.arange(slots) < cursor[:, None, None]), np.arange(slots), -1).astype(np.int32)
        # The token of a step is stored in every head.
        newest = (np.arange(slots) == cursor[:, None] - 1)[:, None] & active[:, None, None]
        position = np.where(newest, np.arange(slots), position).astype(np.int32)
        valid = valid | newest
        codes = make(key, jnp.asarray(valid), signs_of(dim, rotate))
        here = jnp.asarray(np.where(active, cursor - 1, -1)[:, None], jnp.int32)
        state = step(key, jnp.asarray(position), here, jnp.asarray(cursor, jnp.int32), signs_of(dim, rotate), *state)
        beyond = np.maximum(cursor - stop - LOCAL, 0)
        stop = stop + beyond // BUFFER * BUFFER
        np.testing.assert_array_equal(state[4], stop)
        np.testing.assert_array_equal(state[2], count(np.array([2, 2]), stop))
        np.testing.assert_array_equal(state[3], count(stop, np.maximum(cursor - LOCAL, stop)))
        for got, want in zip(state[:2], codes):
            below = (np.arange(slots) < cursor[:, None])[:, None, :, None]
            np.testing.assert_array_equal(got, jnp.where(below, want, jnp.zeros_like(want)))


@pytest.mark.parametrize("name", NAMES)
def test_store_codes_vmap(name):
    dim, slots = 16, 24
    sets = []
    for seed in (1, 2):
        key, valid = keys(seed, dim, slots, rows=1)
        codes = run("xla", dim)(jnp.asarray(key), jnp.asarray(valid), signs_of(dim))
        position = np.where(valid, np.arange(slots), -1).astype(np.int32)
        zero = jnp.zeros((1, 2, 2, 256), jnp.int32)
        numbers = [jnp.asarray(x, jnp.int32) for x in ([[9]], [16], [8])]
        key, position = jnp.nan_to_num(jnp.asarray(key)), jnp.asarray(position)
        sets.append((key, position, *numbers[:2], signs_of(dim), *codes, zero, zero, numbers[2]))
    step = storing(name, dim)
    together = jax.vmap(step)(*(jnp.stack(x) for x in zip(*sets)))
    for i, one in enumerate(sets):
        for a, b in zip(step(*one), together):
            np.testing.assert_array_equal(a, b[i])


def test_several_tokens_take_the_plain_way():
    arrays = [
        ((2, 2, 24, 16), "float32"),
        ((2, 2, 24), "int32"),
        ((2, 3), "int32"),
        ((2,), "int32"),
        ((16,), "float32"),
        ((2, 2, 24, 2), "uint8"),
        ((2, 2, 24, 16), "uint8"),
        ((2, 2, 2, 256), "int32"),
        ((2, 2, 2, 256), "int32"),
        ((2,), "int32"),
    ]
    structs = [jax.ShapeDtypeStruct(*x) for x in arrays]
    fixed = {"num_local": 4, "buffer": 3, "scale": 0.1, "platform": "gpu"}
    assert STORE_CODES.resolve(*structs, **fixed) == "xla"
    structs[2] = jax.ShapeDtypeStruct((2, 1), "int32")
    assert STORE_CODES.resolve(*structs, **fixed) == "pallas_triton"


def test_errors():
    key, valid = keys(1, 16)
    with pytest.raises(ValueError, match="encode: got valid"):
        encode(jnp.asarray(key), jnp.asarray(valid[..., 1:]), None, scale=1.0)
    with pytest.raises(ValueError, match="encode: got signs"):
        encode(jnp.asarray(key), jnp.asarray(valid), jnp.ones(8), scale=1.0)
    with pytest.raises(ValueError, match="expected a power of two"):
        pallas_codes.Config(part=12)
