"""Collision votes of every implementation against NumPy loops: tables, votes, the cut and the list."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.pariskv.collision import Part, pallas_triton
from pallas_kernels.choose.pariskv.collision.votes import portion
from tests.pallas_kernels.cases import NEEDS_GPU, compiled, every_body, implementations, on_gpu, thorough

PIECES = ((60, 0.5, 0.5), (100, 0.3, 0.25), (150, 0.25, 0.2), (None, 0.2, 0.1))  # zone below, tiers of, candidates
TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)


SMALL = pallas_triton.Config(block=64, tile=64)


RUN = implementations("collision", config=SMALL)


def run(name, **static):
    return compiled(RUN[name], **static)


def million(share):
    return round(share * 1e6)


def shares():
    rows = [[end or 0, million(beta), *(million(rho * tier) for tier in TIERS)] for end, rho, beta in PIECES]
    return np.array(rows, np.int32)


def problem(
    seed, *, rows=2, heads=2, group=3, dim=32, slots=200, first=3, stop=(180, 40), holes=False, rotate=True, clusters=256
):
    """Random queries of whole numbers, so that scores tie; few clusters, so that votes do; counts of the zone."""
    rng = np.random.default_rng(seed)
    slices = dim // 8
    query = 3.0 * rng.integers(-2, 3, (rows, heads, group, dim)).astype(np.float32)
    ids = rng.choice(rng.integers(0, clusters, 12), (rows, heads, slots, slices)).astype(np.uint8)
    position = np.broadcast_to(np.arange(slots, dtype=np.int32), (rows, heads, slots)).copy()
    if holes:
        position[rng.random(position.shape) < 0.3] = -1
    stop = np.array(stop, np.int32)
    zone = (position >= 0) & (np.arange(slots) >= first) & (np.arange(slots) < stop[:, None, None])
    counts = np.zeros((rows, heads, slices, 256), np.int32)
    for b, h, s in zip(*np.nonzero(zone)):
        counts[b, h, np.arange(slices), ids[b, h, s]] += 1
    signs = rng.choice([-1.0, 1.0], dim).astype(np.float32) if rotate else None
    arrays = (query, signs, counts, ids, position, stop, shares())
    return tuple(None if x is None else jnp.asarray(x) for x in arrays), zone


def rotated(query, signs):
    query = np.asarray(query, np.float64).mean(axis=0)
    if signs is None:
        return query
    dim = len(query)
    matrix = np.array([[(-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)])
    return matrix @ (query * np.asarray(signs))


def oracle(query, ids, zone, capacity):
    """Candidates of one list: rotated query [D], ids [S, N], zone [S]."""
    size = int(zone.sum())
    rho, beta = next((rho, beta) for end, rho, beta in PIECES if end is None or size < end)
    votes = np.zeros(len(ids), int)
    for n in range(ids.shape[1]):
        part = query[8 * n : 8 * n + 8]
        scores = [sum(y if c >> j & 1 else -y for j, y in enumerate(part)) for c in range(256)]
        order = sorted(range(256), key=lambda c: (-scores[c], c))
        before, table = 0, np.zeros(256, int)
        for c in order:
            table[c] = sum(before < -(-size * million(rho * tier) // 10**6) for tier in TIERS)
            before += int((ids[zone, n] == c).sum())
        votes += table[ids[:, n]]
    count = min(-(-size * million(beta) // 10**6), capacity)
    ranked = sorted(np.flatnonzero(zone), key=lambda s: (-votes[s], s))
    return sorted(ranked[:count])


@every_body
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"holes": True, "stop": (200, 3)},  # an empty zone
        pytest.param(
            {"rows": 1, "heads": 1, "group": 1, "slots": 130, "stop": (130,), "first": 0, "rotate": False}, marks=thorough
        ),
        pytest.param({"rows": 1, "dim": 128, "slots": 2500, "stop": (2400,)}, marks=thorough),  # several blocks of any size
    ],
    ids=["two rows", "holes", "unrotated", "long"],
)
def test_candidates_equal_loops(name, sizes):
    arrays, zone = problem(1, **sizes)
    first, capacity = sizes.get("first", 3), 40 if zone.shape[2] < 1000 else 300
    query, slots, count = run(name, first=first, capacity=capacity)(*arrays)
    assert query.dtype == jnp.float32 and slots.dtype == count.dtype == jnp.int32 and slots.shape[2] == capacity
    for b, h in np.ndindex(zone.shape[:2]):
        query_now = rotated(arrays[0][b, h], arrays[1])
        np.testing.assert_allclose(query[b, h], query_now, rtol=1e-6, atol=1e-5)
        want = oracle(query_now, np.asarray(arrays[3][b, h]), zone[b, h], capacity)
        assert count[b, h] == len(want)
        np.testing.assert_array_equal(slots[b, h, : len(want)], want)


@pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=NEEDS_GPU)])
@pytest.mark.parametrize(
    "limits",
    [pytest.param((264, 2508), id="four warps"), *(pytest.param((0, x), id=str(x), marks=thorough) for x in (2508, 0))],
)
def test_clusters_of_one_score_and_block_stand_in_order(limits, interpret, monkeypatch):
    """Of neighbouring clusters that tie the lower one stands first, however many rivals a program compares at once."""
    for name, limit in zip(("SMALL", "AT_ONCE"), limits, strict=True):
        monkeypatch.setattr(pallas_triton, name, limit)
    arrays, zone = problem(1, rotate=False, clusters=8)
    # Two channels of each slice are 0, so four neighbouring clusters have one score.
    query = jnp.where((jnp.arange(32) % 8 > 1)[None, None, None], arrays[0], 0.0)
    size = 64 if interpret else 128
    config = pallas_triton.Config(block=size, tile=size)
    run = functools.partial(pallas_triton.collision, first=3, capacity=40, config=config, interpret=interpret)
    _, slots, count = jax.jit(run)(query, *arrays[1:])
    for b, h in np.ndindex(zone.shape[:2]):
        want = oracle(rotated(query[b, h], None), np.asarray(arrays[3][b, h]), zone[b, h], 40)
        np.testing.assert_array_equal(slots[b, h, : count[b, h]], want)


@pytest.mark.slow
@every_body
@pytest.mark.parametrize(
    "sizes", [{"holes": True, "stop": (200, 3)}, *(pytest.param(x, marks=thorough) for x in ({}, {"stop": (70, 90)}))]
)
def test_candidates_of_parts_equal_the_whole(name, sizes):
    """Parts of 67 slots, so that the last one has empty slots; the zone of some rows does not reach all of them."""
    (query, signs, counts, ids, position, stop, shares), zone = problem(1, **sizes)
    want_query, want, number = run(name, first=3, capacity=40)(query, signs, counts, ids, position, stop, shares)
    each, parts = 67, -(-ids.shape[2] // 67)
    grow = (0, 0), (0, 0), (0, each * parts - ids.shape[2])
    ids, position = np.pad(ids, (*grow, (0, 0))), np.pad(position, grow, constant_values=-1)
    once = RUN[name]

    def of_part(i, ids, position):
        part = Part(begin=i * each, number=i, every=lambda x: jax.lax.all_gather(x, "parts"))
        return once(query, signs, counts, ids, position, stop, shares, first=3, capacity=40, part=part)

    divided = (np.stack(np.split(x, parts, axis=2)) for x in (ids, position))
    number_of_part = jnp.arange(parts, dtype=jnp.int32)
    queries, slots, n = jax.jit(jax.vmap(of_part, axis_name="parts"))(number_of_part, *divided)
    np.testing.assert_array_equal(queries, np.broadcast_to(want_query, queries.shape))
    assert slots.shape[3] == 40
    for b, h in np.ndindex(zone.shape[:2]):
        listed = [np.asarray(slots[i, b, h, : int(n[i, b, h])]) + i * each for i in range(parts)]
        np.testing.assert_array_equal(np.concatenate(listed), want[b, h, : int(number[b, h])])


@on_gpu
def test_equal_votes_choose_the_first_keys_of_the_zone(name):
    """Every key in one cluster: the candidates are the first keys of the zone, and no more than there is room for."""
    arrays, _ = problem(2, stop=(200, 200))  # the program of the test above
    query, signs, counts, ids, *rest = arrays
    ids = jnp.full_like(ids, 7)
    counts = jnp.zeros_like(counts).at[..., 7].set(197)
    for capacity, want in ((40, 20), (13, 13)):
        _, slots, count = run(name, first=3, capacity=capacity)(query, signs, counts, ids, *rest)
        assert np.all(np.asarray(count) == want)
        assert np.all(np.asarray(slots[..., :want]) == np.arange(3, 3 + want))


def test_portion_is_exact():
    count = np.arange(1, 2_100_000, 9973, dtype=np.int32)
    for part in (1, 50_000, 333_333, 10**6):
        got = jax.jit(portion)(jnp.full(count.shape, part, jnp.int32), jnp.asarray(count))
        np.testing.assert_array_equal(got, -(-count.astype(np.int64) * part // 10**6))


@pytest.mark.parametrize(("lists", "slots"), [(8, 131_328), (64, 131_328), (8, 1 << 20), (1, 3000), (8, 4 << 20)])
def test_default_blocks_cover_and_stay_few(lists, slots):
    config = pallas_triton.default_config(lists, slots)
    assert -(-slots // config.block) <= pallas_triton.MOST_BLOCKS


def test_small_blocks_run_interpreted_only():
    with pytest.raises(ValueError, match="at least 128 keys on a GPU"):
        pallas_triton.collision(*problem(6)[0], first=3, capacity=5, config=pallas_triton.Config(tile=64))
