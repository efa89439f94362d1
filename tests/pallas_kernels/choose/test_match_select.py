"""`bucket_matches`, `match_select` and `sampled_bias` (MagicPIG) against NumPy loops, which for numbers are in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.magicpig import match_select as select
from pallas_kernels.choose.magicpig.match_select import pallas_triton as lists
from pallas_kernels.formats.quantised import quantise
from pallas_kernels.score.magicpig import sampled_bias as biases
from pallas_kernels.score.magicpig.bucket_matches import pallas_triton as scan
from tests.pallas_kernels.cases import alike, compiled, every_body, every_kernel, implementations, one_shape
from tests.pallas_kernels.ptx import Threads

BLOCK = scan.Config(num_warps=1)
MATCHES = implementations("bucket_matches", config=BLOCK)
SELECT = implementations("match_select", config=BLOCK)
BIAS = implementations("sampled_bias")


def hashed(seed, tables, bits, slots, rows=4, group=3):
    """Buckets of queries and slots in which both ends of the range of numbers are frequent."""
    rng = np.random.default_rng(seed)
    kind, most = (np.uint8 if bits <= 8 else np.uint16), (1 << bits) - 1

    def some(*shape):
        ends = rng.choice([0, 1, most], shape)
        return jnp.asarray(np.where(rng.random(shape) < 0.3, ends, rng.integers(0, most + 1, shape)), kind)

    return some(rows, 2, group, tables), some(rows, 2, tables, slots)


def wide(arrays):
    """In two bytes each, as the kernel takes them."""
    return tuple(x.astype(jnp.uint16) for x in arrays)


def counted(query, ids, first, near):
    """The equal buckets of each query head and slot of one KV head: [G, N]; 0 below two, and outside of the zone."""
    equal = (np.asarray(query)[:, :, None] == np.asarray(ids)[None]).sum(axis=1)
    slot = np.arange(equal.shape[1])
    return np.where((equal >= 2) & (slot >= first) & (slot < near), equal, 0)


def expected(query, ids, near, length, first, capacity, room):
    """The list of one KV head: slots, mask, the query heads that sampled, and how many are sampled."""
    equal = counted(query, ids, first, near)
    most = equal.max(axis=0)
    sampled = [i for i in range(len(most)) if most[i]]
    best = sorted(sorted(sampled, key=lambda i: (-most[i], i))[:capacity])
    parts = [*range(first), *best, *[0] * (capacity - len(best)), *range(near, near + room)]
    held = [i < length for i in parts]
    held[first : first + capacity] = [j < len(best) for j in range(capacity)]
    mask = np.array(held)
    own = np.ones((len(equal), len(parts)), bool)
    own[:, first : first + len(best)] = equal[:, best] > 0
    return np.where(mask, parts, 0), mask, own & mask, len(sampled)


def ragged(slots, first, room):
    length = np.array([slots, slots * 3 // 4, first + 1, max(first - 1, 0)], np.int32)
    return np.maximum(length - room, first).astype(np.int32), length


@every_body
@pytest.mark.parametrize(
    ("tables", "bits", "slots", "group", "first", "capacity", "room"),
    one_shape(
        (9, 3, 600, 3, 5, 60, 9),
        (6, 9, 303, 4, 0, 400, 0),
        (30, 10, 1024, 8, 300, 100, 70),
        (5, 14, 512, 1, 2, 1, 3),
        (2, 1, 90, 5, 1, 30, 4),
    ),
)
def test_lists_equal_loops(name, tables, bits, slots, group, first, capacity, room):
    query, ids = wide(hashed(tables, tables, bits, slots, group=group))
    near, length = ragged(slots, first, room)
    sizes = {"first": first, "capacity": capacity, "room": room}
    got = compiled(SELECT[name], **sizes, num_bits=bits)(query, ids, jnp.asarray(near), jnp.asarray(length))
    matched = compiled(MATCHES[name], first=first, num_bits=bits)(query, ids, jnp.asarray(near))
    for r, h in np.ndindex(4, 2):
        want = expected(query[r, h], ids[r, h], near[r], length[r], **sizes)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one[r, h], other)
        np.testing.assert_array_equal(matched[r, h], counted(query[r, h], ids[r, h], first, near[r]) > 0)


@pytest.mark.parametrize("bits", [3, 10, 14])
def test_assembly_counts_equal_buckets(bits):
    """The interpreter cannot run it, so NumPy does, for two tokens in each thread."""
    query, ids = hashed(bits, 2000, bits, 64, rows=1, group=1)
    query, ids = (np.asarray(x, np.uint16)[0, 0] for x in (query, ids))
    counts = np.zeros(64, np.float16)
    for table in range(2000):
        pairs = (counts, ids[table], np.full(64, query[0, table], np.uint16))
        (added,) = Threads(32, words=0).run(scan.ADD, 1, [x.view(np.uint32) for x in pairs])
        counts = added.view(np.float16)
    np.testing.assert_array_equal(counts, (ids == query[0][:, None]).sum(axis=0))


@pytest.mark.parametrize("bits", [4, 16])
def test_numbers_that_have_no_kernel(bits):
    """A byte each, or those that float16 takes for infinite or NaN."""
    query, ids = hashed(3, 6, bits, 200)
    near, length = ragged(200, 3, 8)
    sizes = {"first": 3, "capacity": 20, "room": 8}
    got = compiled(select.match_select, **sizes, num_bits=bits)(query, ids, near, length)
    for r, h in np.ndindex(4, 2):
        want = expected(query[r, h], ids[r, h], near[r], length[r], **sizes)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one[r, h], other)


@every_kernel
def test_equal_tokens_are_listed_from_the_first(name):
    """They have one count, so the first ones are listed; in the other row no token is sampled at all."""
    query, ids = np.ones((4, 2, 3, 9), np.uint16), np.ones((4, 2, 9, 600), np.uint16)
    ids[1::2] = 2
    near, length = np.full(4, 580, np.int32), np.full(4, 583, np.int32)
    run = compiled(SELECT[name], first=5, capacity=60, room=9, num_bits=3)  # as above
    slots, mask, own, sampled = map(np.asarray, run(query, ids, near, length))
    np.testing.assert_array_equal(slots[0, 0, :65], np.arange(65))
    np.testing.assert_array_equal(mask.sum(axis=2), [[68, 68], [8, 8]] * 2)
    np.testing.assert_array_equal(own, np.broadcast_to(mask[:, :, None], own.shape))
    np.testing.assert_array_equal(sampled, [[575, 575], [0, 0]] * 2)


@pytest.mark.thorough
@every_kernel
def test_many_blocks_equal_the_plain_version(name):
    """More than `match_cut` reads together, under the division that a GPU gets."""
    query, ids = wide(hashed(6, 150, 4, 40_000, rows=1, group=2))
    args = query, ids, jnp.array([39_000], jnp.int32), jnp.array([39_100], jnp.int32)
    sizes = {"first": 4, "capacity": 5000, "room": 128, "num_bits": 4}
    run = functools.partial(lists.match_select, interpret=True) if name == "interpreted" else SELECT[name]
    alike(run(*args, **sizes), SELECT["xla"](*args, **sizes))


def keyed(seed, dtype="float32", group=3, dim=16, slots=200, entries=90):
    """One key of a zone is its centre, and slots that are not asked for hold NaN."""
    rng = np.random.default_rng(seed)
    query, centre = rng.normal(size=(2, 2, group, dim)), rng.normal(size=(2, 2, dim))
    key = rng.normal(size=(2, 2, slots, dim))
    listed = np.sort(np.argsort(rng.random((2, 2, slots)), axis=2)[..., :entries], axis=2)
    key[:, :, 50] = centre = np.asarray(jnp.asarray(centre, dtype), np.float32)
    own = rng.random((2, 2, group, slots)) < 0.6
    np.swapaxes(key, 2, 3)[np.broadcast_to(~own.any(axis=2)[:, :, None], (2, 2, dim, slots))] = np.nan
    near = jnp.array([150, 60], jnp.int32)
    arrays = jnp.asarray(query, dtype), jnp.asarray(key, dtype), jnp.asarray(centre, jnp.float32)
    own_listed = jnp.asarray(np.take_along_axis(own, listed[:, :, None], axis=3))
    return *arrays, jnp.asarray(listed, jnp.int32), own_listed, own, near


def corrected(query, key, centre, slots, own, near, first, num_tables, num_bits):
    query, key, centre = (np.asarray(x, np.float64) for x in (query, key, centre))
    bias = np.full(own.shape, -np.inf)
    for b, h, g, i in np.argwhere(np.asarray(own)):
        slot, q = int(slots[b, h, i]), query[b, h, g]
        away = key[b, h, slot] - centre[b, h]
        norms = np.linalg.norm(q) * np.linalg.norm(away)
        same = (1 - np.arccos(np.clip(q @ away / norms if norms else 0.0, -1, 1)) / np.pi) ** num_bits
        chance = 1 - (1 - same) ** num_tables - num_tables * same * (1 - same) ** (num_tables - 1)
        bias[b, h, g, i] = -np.log(chance + 1e-4) if first <= slot < near[b] else 0.0
    return bias


@every_body
@pytest.mark.parametrize(("dtype", "group", "bits"), one_shape(("float32", 3, 3), ("bfloat16", 4, 10), ("float32", 1, 1)))
def test_biases_equal_float64(name, dtype, group, bits):
    query, key, centre, slots, own, every, near = keyed(bits, dtype, group)
    sizes = {"first": 4, "num_tables": 12, "num_bits": bits}
    run, near_of = compiled(BIAS[name], **sizes), np.asarray(near)
    want = corrected(query, key, centre, np.asarray(slots), own, near_of, **sizes)
    np.testing.assert_allclose(run(query, key, centre, slots, own, near), want, rtol=1e-3, atol=4e-3)
    all_slots = np.broadcast_to(np.arange(200), (2, 2, 200))
    want = corrected(query, key, centre, all_slots, every, near_of, **sizes)
    got = compiled(functools.partial(BIAS[name], slots=None), **sizes)(
        query=query, key=key, centre=centre, own=jnp.asarray(every), near=near
    )
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=4e-3)
    assert np.isfinite(want).mean() > 0.4


def test_biases_of_keys_in_8_bits():
    query, key, centre, slots, own, _, near = keyed(8)
    codes, sizes = (
        jax.jit(quantise, static_argnums=1)(np.nan_to_num(key), "int8"),
        {"first": 4, "num_tables": 12, "num_bits": 3},
    )
    plain = np.asarray(codes.codes, np.float64) * np.asarray(codes.scale, np.float64)[..., None]
    want = corrected(query, plain, centre, np.asarray(slots), own, np.asarray(near), **sizes)
    got = compiled(biases.sampled_bias, **sizes)(query, codes, centre, slots, own, near)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=4e-3)
    assert biases.SAMPLED_BIAS.resolve(query, codes, centre, slots, own, near, **sizes, platform="gpu") == "xla"
