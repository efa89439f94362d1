"""The hash tables that SOCKET keeps: every implementation against float64 loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.sign_codes import BLOCK
from tests.pallas_kernels.cases import compiled, every_body, implementations, one_shape


def storing(name):
    return compiled(implementations("store_buckets")[name])


def problem(seed, cursor, *, heads=2, dim=16, tables=3, bits=5, slots=40, dtype="float32", more=0):
    """Random keys and values, NaN behind the newest token; an index of random numbers, none of which may change."""
    rng = np.random.default_rng(seed)
    rows = len(cursor)
    stored = (np.arange(slots) < np.asarray(cursor)[:, None])[:, None, :, None]
    key, value = (jnp.asarray(np.where(stored, rng.normal(size=(rows, heads, slots, dim)), np.nan), dtype) for _ in "kv")
    planes = jnp.asarray(rng.normal(size=(tables, bits, dim)), jnp.float32)
    blocks = -(-(slots + more) // BLOCK)
    ids = rng.integers(0, 1 << bits, (rows, heads, blocks, tables * BLOCK)).astype(np.uint8 if bits <= 8 else np.uint16)
    norm = jnp.asarray(rng.normal(size=(rows, heads, slots)), dtype)
    return key, value, jnp.asarray(cursor, jnp.int32), planes, jnp.asarray(ids), norm


def oracle(key, value, slots_of_rows, planes, ids, norm):
    key, value, planes = (np.asarray(x, np.float64) for x in (key, value, planes))
    ids, norm = np.array(ids), np.array(norm, np.float64)
    for b, new in enumerate(slots_of_rows):
        for slot in new:
            for h in range(ids.shape[1]):
                for table, own in enumerate(planes):
                    place = slot // BLOCK, table * BLOCK + slot % BLOCK
                    ids[b, h][place] = int("".join("01"[int(plane @ key[b, h, slot] >= 0)] for plane in own), 2)
                norm[b, h, slot] = np.linalg.norm(value[b, h, slot])
    return ids, norm


def compare(got, want, dtype="float32"):
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_allclose(np.asarray(got[1], np.float64), want[1], rtol=1e-5 if dtype == "float32" else 1e-2)


@every_body
@pytest.mark.parametrize(("bits", "dtype"), one_shape((5, "float32"), (8, "bfloat16"), (11, "float32"), (1, "float32")))
def test_one_token_is_stored_where_there_is_one(name, bits, dtype):
    """The second row has padding, and in the third all slots are taken."""
    key, value, cursor, *index = problem(bits, [17, 9, 41], bits=bits, dtype=dtype, more=8)
    active = jnp.asarray([[16], [-1], [40]], jnp.int32)
    got = storing(name)(key, value, active, cursor, *index)
    compare(got, oracle(key, value, [[16], [], []], *index), dtype)


def test_several_tokens_are_stored_at_once():
    key, value, cursor, *index = problem(3, [17, 9, 42], more=8)
    active = jnp.asarray([[14, 15, 16], [8, -1, -1], [39, 40, 41]], jnp.int32)
    got = storing("xla")(key, value, active, cursor, *index)
    compare(got, oracle(key, value, [[14, 15, 16], [8], [39]], *index))
