"""`code_select` against float64 NumPy: every implementation; equal scores, ragged rows, poisoned codes behind the end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.pqcache.code_select import pallas_triton as kernel
from pallas_kernels.formats import bit_codes
from tests.pallas_kernels.cases import compiled, every_body_and_dtype, every_kernel, implementations, one_shape

SELECT = implementations("code_select", config=kernel.Config(block=64))


def coded(seed, count, parts, slots, rows=4, group=3, dim=12, dtype="float32"):
    """Queries and codes; two centroids of each part are equal. Slots behind a row's length have any code."""
    rng = np.random.default_rng(seed)
    query, centroids = rng.normal(size=(rows, 2, group, dim)), rng.normal(size=(rows, 2, parts, count, dim // parts))
    centroids[:, :, :, -1] = centroids[:, :, :, 0]
    numbers = rng.integers(0, count, (rows, 2, slots, parts))
    shift = np.arange(parts) * bit_codes.bits_of(count)
    code = jnp.asarray((numbers << shift).sum(axis=3), jnp.int32)
    ids = bit_codes.pack(code, parts * bit_codes.bits_of(count))
    return jnp.asarray(query, dtype), jnp.asarray(centroids, jnp.float32), ids, numbers


def expected(query, centroids, numbers, stop, length, wanted, first, capacity, room):
    """The list of one head, in float64: its slots, and which of them count."""
    query, centroids = np.asarray(query, np.float64), np.asarray(centroids, np.float64)
    zone = range(first, stop)
    keys = [np.concatenate([centroids[m, numbers[i, m]] for m in range(len(centroids))]) for i in zone]
    best = []
    if keys:
        logits = query @ np.array(keys).T / np.sqrt(query.shape[1])
        weight = np.exp(logits - logits.max(axis=1, keepdims=True))
        score = np.round(np.log((weight / weight.sum(axis=1, keepdims=True)).sum(axis=0)), 5)
        best = sorted(sorted(zone, key=lambda i: (-score[i - first], i))[: min(wanted, capacity)])
    parts = [list(range(first)), best + [0] * (capacity - len(best)), list(range(stop, stop + room))]
    held = [[i < length for i in parts[0]], [j < len(best) for j in range(capacity)], [i < length for i in parts[2]]]
    mask = np.array(sum(held, []), bool)
    return np.where(mask, sum(parts, []), 0), mask


@every_body_and_dtype
@pytest.mark.parametrize(
    ("count", "parts", "slots", "first", "capacity", "room"),
    one_shape(
        (4, 2, 300, 3, 40, 9), (5, 2, 500, 0, 100, 0), (3, 3, 200, 70, 1, 4), (2, 1, 130, 1, 200, 70), (8, 2, 64, 2, 7, 5)
    ),
)
def test_lists_equal_float64(name, count, parts, slots, first, capacity, room, dtype):
    query, centroids, ids, numbers = coded(count + slots, count, parts, slots, dtype=dtype)
    length = np.array([slots, slots * 3 // 4, first + 1, max(first - 1, 0)])
    stop = np.maximum(length - 1 - np.array([room // 2, room, 0, 0]), first)
    wanted = np.array([capacity, capacity // 2, capacity + 5, 3])
    vectors = (jnp.asarray(x, jnp.int32) for x in (stop, length, wanted))
    sizes = {"first": first, "capacity": capacity, "room": room}
    listed, mask = compiled(SELECT[name], **sizes)(query, centroids, ids, *vectors)
    for r, h in np.ndindex(4, 2):
        slot, used = expected(query[r, h], centroids[r, h], numbers[r, h], stop[r], length[r], wanted[r], **sizes)
        np.testing.assert_array_equal(mask[r, h], used)
        np.testing.assert_array_equal(listed[r, h], slot)


@every_kernel
def test_of_equal_scores_the_lower_slots_are_listed(name):
    """All slots have one code; nothing is wanted in the second row, and a NaN query finds nothing that it may not."""
    query, centroids, ids, _ = coded(304, 4, 2, 300)
    query, centroids, ids = (np.ones_like(x) * value for x, value in ((query, 1), (centroids, 1), (ids, 0)))
    query[1] = np.nan
    stop, length, wanted = (np.array([x, y, x, y], np.int32) for x, y in ((250, 250), (255, 255), (30, 0)))
    listed, mask = compiled(SELECT[name], first=3, capacity=40, room=9)(query, centroids, ids, stop, length, wanted)
    np.testing.assert_array_equal(listed[0, 0, :43], [*range(33), *[0] * 10])
    np.testing.assert_array_equal(listed[:, 0, 43:], [[*range(250, 255), *[0] * 4]] * 4)
    np.testing.assert_array_equal(np.asarray(mask)[:, 0].sum(axis=1), [38, 8, 38, 8])


@pytest.mark.thorough
def test_the_kernel_lists_what_plain_jax_lists():
    """With 4,096 codes and blocks of 4,096 slots. Scores differ in their last digits, so a slot may be another one there."""
    query, centroids, ids, _ = coded(3, 64, 2, 20000, rows=2, group=4, dim=32)
    stop, length = jnp.array([19000, 9000]), jnp.array([20000, 9700])
    sizes = {"first": 32, "capacity": 1000, "room": 1001}
    run = functools.partial(kernel.code_select, config=kernel.Config(block=4096), interpret=True, **sizes)
    args = query, centroids, ids, stop, length, jnp.array([1000, 450])
    (listed, mask), (other, also) = jax.jit(run)(*args), SELECT["xla"](*args, **sizes)
    np.testing.assert_array_equal(mask, also)
    for r, h in np.ndindex(2, 2):
        assert len(set(np.asarray(listed[r, h])) ^ set(np.asarray(other[r, h]))) <= 4
