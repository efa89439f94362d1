"""Codes of keys: every implementation against the oracle of ParisKV."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.key_codes import parts_of_rows
from pallas_kernels.store.pariskv.encode import encode, pallas_triton
from tests.oracles import pariskv as plain
from tests.pallas_kernels.cases import MOSAIC, alike, compiled, every_body, implementations, on_gpu, on_hopper, one_shape

ENCODE = implementations("encode") | on_hopper(encode)


def keys_to_encode(seed, dim, tokens=11, rows=2, heads=2):
    """Keys of very different length, a zero key, and NaN for keys that are not valid."""
    rng = np.random.default_rng(seed)
    key = rng.normal(size=(rows, heads, tokens, dim)) * 10.0 ** rng.uniform(-3, 3, (rows, heads, tokens, 1))
    valid = rng.random((rows, heads, tokens)) < 0.8
    key[0, 0, 1], valid[0, 0, 1] = 0, True
    return np.where(valid[..., None], key, np.nan).astype(np.float32), valid


def signs_of(dim, rotate=True):
    """The signs of the rotation, or None."""
    return jnp.asarray(plain.random_signs(dim), jnp.float32) if rotate else None


def encoding(name, dim, rotate=True, part=4):
    """`encode` by implementation ``name``, jitted; ``part`` keys per program where it runs interpreted."""
    run = ENCODE[name] if name == MOSAIC else implementations("encode", config=pallas_triton.Config(part))[name]
    return compiled(run, scale=dim**-0.5 if rotate else 1.0)


@every_body
@pytest.mark.parametrize(("dim", "rotate"), [(16, True), *one_shape((64, False), (128, True))])
def test_codes_equal_the_oracle(name, dim, rotate):
    key, valid = keys_to_encode(dim, dim)
    ids, rows = encoding(name, dim, rotate)(jnp.asarray(key), jnp.asarray(valid), signs_of(dim, rotate))
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


@on_gpu
def test_codes_do_not_depend_on_the_batch(name):
    """To the last bit, alone or among others, whichever block they fall into."""
    key, valid = keys_to_encode(3, 32)
    valid[:] = True
    key = jnp.nan_to_num(jnp.asarray(key))
    whole = encoding(name, 32)(key, jnp.asarray(valid), signs_of(32))
    for part, (start, stop) in ((1, (4, 5)), (8, (3, 10))):
        some = encoding(name, 32, part=part)(key[:, :, start:stop], jnp.asarray(valid[:, :1, start:stop]), signs_of(32))
        for a, b in zip(some, whole):
            np.testing.assert_array_equal(a, b[:, :, start:stop])


def test_both_implementations_agree_to_the_bit_where_divisions_do():
    """The interpreter divides as the plain version does, so everything must be equal."""
    key, valid = keys_to_encode(5, 16)
    args = jnp.asarray(key), jnp.asarray(valid), signs_of(16)
    alike(encoding("xla", 16)(*args), encoding("interpreted", 16)(*args))
