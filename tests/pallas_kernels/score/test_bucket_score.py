"""SOCKET's scores of every implementation against float64 loops."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.formats.sign_codes import BLOCK
from pallas_kernels.score.socket.bucket_score import lookup, pallas_triton
from tests.pallas_kernels.cases import compiled, every_body, implementations, one_shape, thorough
from tests.pallas_kernels.ptx import Threads, words_of

FIRST, LOCAL = 3, 5
TEMPERATURE = 0.3


def scoring(name, warps=None, first=FIRST, num_local=LOCAL):
    config = None if warps is None else pallas_triton.Config(blocks=2, num_warps=warps, ahead=1 + warps // 32)
    run = implementations("bucket_score", config=config)[name]
    return compiled(run, first=first, num_local=num_local)


def problem(seed, *, rows=2, heads=2, group=3, dim=32, tables=5, bits=4, slots=200, dtype="float32", cursor=None, more=0):
    """Random arrays; holes, and NaN norms in them and behind the newest token, where buckets are random too.

    Buckets have at least ``more`` slots than the rest.
    """
    rng = np.random.default_rng(seed)
    query = jnp.asarray(rng.normal(size=(rows, heads, group, dim)), dtype)
    planes = jnp.asarray(rng.normal(size=(tables, bits, dim)), jnp.float32)
    blocks = -(-(slots + more) // BLOCK)
    ids = rng.integers(0, 1 << bits, (rows, heads, blocks, tables * BLOCK)).astype(np.uint8 if bits <= 8 else np.uint16)
    cursor = np.array([slots, slots // 3][:rows] if cursor is None else cursor, np.int32)
    position = np.broadcast_to(np.arange(slots, dtype=np.int32), (rows, heads, slots)).copy()
    position[(rng.random(position.shape) < 0.2) | (position >= cursor[:, None, None])] = -1
    norm = np.where(position >= 0, np.abs(rng.normal(size=position.shape)), np.nan)
    arrays = query, planes, jnp.float32(TEMPERATURE), ids, jnp.asarray(norm, dtype), position, cursor
    return tuple(map(jnp.asarray, arrays))


def oracle(query, planes, temperature, ids, norm, position, cursor, first=FIRST, num_local=LOCAL):
    """Float64 [B, H, S]."""
    query, planes, norm = (np.asarray(x, np.float64) for x in (query, planes, norm))
    ids, position, cursor = map(np.asarray, (ids, position, cursor))
    corners = np.array(list(itertools.product((-1.0, 1.0), repeat=planes.shape[1])))
    score = np.full(position.shape, -np.inf)
    for b, h in np.ndindex(*position.shape[:2]):
        likely = np.zeros((len(planes), len(corners)))
        for q, table in itertools.product(query[b, h], range(len(planes))):
            weight = np.exp(corners @ np.tanh(planes[table] @ q) / np.sqrt(query.shape[3]) / float(temperature))
            likely[table] += weight / weight.sum()
        for slot in range(first, min(int(cursor[b]) - num_local, position.shape[2])):
            if position[b, h, slot] >= 0:
                own = ids[b, h, slot // BLOCK, slot % BLOCK :: BLOCK]
                score[b, h, slot] = norm[b, h, slot] * sum(likely[t, bucket] for t, bucket in enumerate(own))
    return score


@every_body
@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    one_shape((4, 3, "float32"), (8, 4, "bfloat16"), (3, 1, "float32"), (2, 8, "bfloat16"), (5, 7, "float32")),
)
def test_scores_equal_float64_loops(name, bits, group, dtype):
    arrays = problem(bits, bits=bits, group=group, dtype=dtype)
    got = np.asarray(scoring(name)(*arrays))
    want = oracle(*arrays)
    assert np.isfinite(want).mean() > 0.4
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("name", ["interpreted", "pallas_triton"][: 1 + (jax.default_backend() == "gpu")])
@pytest.mark.parametrize("warps", [8, pytest.param(16, marks=thorough), pytest.param(32, marks=thorough)])
def test_several_programs_of_one_list(name, warps):
    """Some of their steps have nothing to search, and the last one reaches beyond the slots."""
    step = 32 * warps
    arrays = problem(2, slots=7 * step + 100, tables=3, bits=8, heads=1, cursor=[2 * step + 40, 6 * step], more=3)
    np.testing.assert_allclose(scoring(name, warps, first=step + 9)(*arrays), oracle(*arrays, first=step + 9), rtol=1e-5)


@every_body
@pytest.mark.parametrize("tables", one_shape(140, 17, 32, 60, 67))
def test_more_tables_than_there_are_at_once(name, tables):
    arrays = problem(8, slots=90, tables=tables, bits=4, heads=1, group=2)
    np.testing.assert_allclose(scoring(name)(*arrays), oracle(*arrays), rtol=1e-5)


@pytest.mark.parametrize("warps", [8, 16, 32])
@pytest.mark.parametrize(("bits", "pages"), [(2, 1), (6, 2), (8, 4), (7, 3)])
def test_assembly_finds_and_adds_entries_without_conflicts(warps, bits, pages):
    """The interpreter cannot run it, so NumPy does."""
    rng, threads = np.random.default_rng(bits), 32 * warps
    row = np.arange(threads, dtype=np.int32)
    entries = max(1 << bits, lookup.ENTRIES)
    tables = rng.normal(size=(pages * BLOCK, entries)).astype(np.float32)
    ids = rng.integers(0, 1 << bits, (pages, threads // BLOCK, BLOCK, BLOCK)).astype(np.uint8)  # of a block's tables
    machine = Threads(threads, words=lookup.room(pages) // 4)
    shares = entries // lookup.ENTRIES
    for begin in range(0, pages * shares, warps):
        page, share, place = map(np.asarray, lookup.copying(begin, row, pages, shares))
        source = tables.reshape(-1, shares, lookup.ENTRIES)[page * BLOCK + row % BLOCK, share]
        copy = lookup.copy(begin + warps <= pages * shares)
        machine.run(copy, lookup.ENTRIES, source.T, *[[x] * lookup.ENTRIES for x in (place, row)])
    assert machine.writes.sum() == 2 * tables.size
    assert machine.writes.max() == 1
    (lane,) = machine.run(lookup.ready(), 1, [0 * row])
    sums = None
    for page in range(pages):
        words = words_of(ids[page].reshape(threads, BLOCK))
        sums = machine.run(lookup.look_up(page, page == 0), BLOCK, words, [lane] * BLOCK, sums or [])
    total, *others = machine.run(lookup.add_up(), BLOCK, sums)
    want = sum(tables[page * BLOCK + np.arange(BLOCK)[:, None], ids[page]] for page in range(pages)).sum(axis=1)
    np.testing.assert_allclose(total.view(np.float32), want.reshape(threads), rtol=1e-5, atol=1e-5)
    assert not np.any(others)


@every_body
def test_nothing_is_searched_in_a_row_that_is_new(name):
    """Its tokens are sinks or the newest."""
    arrays = problem(3, cursor=[0, FIRST + LOCAL])
    assert np.all(np.asarray(scoring(name)(*arrays)) == -np.inf)


def test_more_buckets_than_a_byte_counts():
    arrays = problem(6, bits=10, tables=2)
    np.testing.assert_allclose(scoring("xla")(*arrays), oracle(*arrays), rtol=1e-5)
