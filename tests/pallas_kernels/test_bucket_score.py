"""SOCKET's scores of every implementation against float64 loops."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.bucket_score import BUCKET_SCORE, bucket_score, pallas_triton
from tests.pallas_kernels.cases import compiled, every_body, on_gpu, one_shape, thorough
from tests.pallas_kernels.ptx import Threads, words_of

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
FIRST, LOCAL = 3, 5
TEMPERATURE = 0.3


def scoring(name, warps=None, first=FIRST, num_local=LOCAL):
    fixed = {"first": first, "num_local": num_local}
    if name != "interpreted":
        return compiled(bucket_score, **fixed, implementation=name)
    config = None if warps is None else pallas_triton.Config(num_warps=warps)
    return compiled(pallas_triton.bucket_score, **fixed, config=config, interpret=True)


def problem(seed, *, rows=2, heads=2, group=3, dim=32, tables=5, bits=4, slots=200, dtype="float32", cursor=None, more=0):
    """Random arrays; holes, and NaN norms in them and behind the newest token, where buckets are random too.

    Buckets have ``more`` slots than the rest.
    """
    rng = np.random.default_rng(seed)
    query = jnp.asarray(rng.normal(size=(rows, heads, group, dim)), dtype)
    planes = jnp.asarray(rng.normal(size=(tables, bits, dim)), jnp.float32)
    ids = rng.integers(0, 1 << bits, (rows, heads, tables, slots + more)).astype(np.uint8 if bits <= 8 else np.uint16)
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
                score[b, h, slot] = norm[b, h, slot] * sum(likely[t, ids[b, h, t, slot]] for t in range(len(planes)))
    return score


@every_body
@pytest.mark.parametrize(
    ("bits", "group", "dtype"),
    one_shape((4, 3, "float32"), (8, 4, "bfloat16"), (3, 1, "float32"), (2, 8, "bfloat16"), (5, 7, "float32")),
)
def test_scores_are_those_of_float64_loops(name, bits, group, dtype):
    arrays = problem(bits, bits=bits, group=group, dtype=dtype)
    got = np.asarray(scoring(name)(*arrays))
    want = oracle(*arrays)
    assert np.isfinite(want).mean() > 0.4
    np.testing.assert_allclose(got, want, rtol=1e-5)


@on_gpu
def test_sixteen_rows(name):
    arrays = problem(1, rows=16, slots=70, bits=3, cursor=np.arange(16) * 5, more=10)
    np.testing.assert_allclose(scoring(name)(*arrays), oracle(*arrays), rtol=1e-5)


@pytest.mark.parametrize("name", ["interpreted", "pallas_triton"][: 1 + (jax.default_backend() == "gpu")])
@pytest.mark.parametrize("warps", [4, pytest.param(8, marks=thorough), pytest.param(16, marks=thorough)])
def test_several_programs_of_one_list(name, warps):
    """Some of them have nothing to search, and the last one reaches beyond the slots."""
    cursor = [512 * warps + 40, 750 * warps]
    arrays = problem(2, slots=3 * 512 * warps + 100, tables=3, bits=8, heads=1, cursor=cursor, more=3)
    np.testing.assert_allclose(scoring(name, warps)(*arrays), oracle(*arrays), rtol=1e-5)


@pytest.mark.parametrize("warps", [4, 8, 16])
@pytest.mark.parametrize("bits", [2, 3, 6, 8])
def test_assembly_writes_each_copy_once_and_adds_entries_without_conflicts(warps, bits):
    """The interpreter cannot run it, so NumPy does."""
    rng, threads, pack, size = np.random.default_rng(bits), 32 * warps, pallas_triton.PACK, 4 << bits
    row, column = np.arange(threads, dtype=np.int32)[:, None], np.arange(pack, dtype=np.int32)[None]
    source, place = map(np.asarray, pallas_triton.copying(row, column, threads, size))
    table = rng.normal(size=1 << bits).astype(np.float32)
    ids = rng.integers(0, 1 << bits, (threads, pack)).astype(np.uint8)
    sums = rng.normal(size=(threads, pack)).astype(np.float32)
    operands = [*words_of(ids), *words_of(table.view(np.uint8)[source]), *place.T, *sums.T]
    machine = Threads({f"${pack + i}": x for i, x in enumerate(operands)}, words=pallas_triton.BANKS * (1 << bits))
    machine.run(pallas_triton.look_up(threads, size))
    got = np.stack([machine.registers[f"${i}"].view(np.float32) for i in range(pack)], axis=1)
    np.testing.assert_array_equal(got, sums + table[ids])
    np.testing.assert_array_equal(machine.writes, 1)


@every_body
def test_nothing_is_searched_in_a_row_that_is_new(name):
    """Its tokens are sinks or the newest."""
    arrays = problem(3, cursor=[0, FIRST + LOCAL])
    assert np.all(np.asarray(scoring(name)(*arrays)) == -np.inf)


@on_gpu
def test_vmap(name):
    sets = [problem(seed, rows=1, slots=40) for seed in (4, 5)]
    run = scoring(name)
    together = jax.jit(jax.vmap(run))(*(jnp.stack(x) for x in zip(*sets)))
    for one, got in zip(sets, together):
        np.testing.assert_allclose(got, run(*one), rtol=1e-6)


def test_more_buckets_than_a_byte_counts():
    """They have no kernel."""
    arrays = problem(6, bits=10, tables=2)
    np.testing.assert_allclose(scoring("xla")(*arrays), oracle(*arrays), rtol=1e-5)
    assert resolved(bits=10) == resolved(bits=1) == "xla"


def resolved(bits=8, dim=32, rows=1, slots=200):
    kind = "uint8" if bits <= 8 else "uint16"
    shapes = [
        ((rows, 8, 4, dim), "bfloat16"),
        ((60, bits, dim), "float32"),
        ((), "float32"),
        ((rows, 8, 60, slots), kind),
        ((rows, 8, slots), "bfloat16"),
        ((rows, 8, slots), "int32"),
        ((rows,), "int32"),
    ]
    structs = [jax.ShapeDtypeStruct(*x) for x in shapes]
    return BUCKET_SCORE.resolve(*structs, first=FIRST, num_local=LOCAL, platform="gpu")


def test_what_the_kernels_take():
    assert resolved() == "pallas_triton"
    assert resolved(dim=48) == "xla"
    assert resolved(rows=40, slots=1 << 17) == "xla", "offsets into bytes between 2 and 4 GiB wrap"


def test_programs_are_large_where_there_are_enough_of_them():
    sizes = [pallas_triton.default_config(lists, slots).num_warps for lists, slots in ((8, 131_136), (8, 65_536), (8, 8192))]
    assert sizes == [16, 8, 4]


def test_errors():
    arrays = list(problem(7))
    with pytest.raises(ValueError, match="bucket_score: got query .* expected"):
        bucket_score(*arrays[:4], arrays[4][:, :1], *arrays[5:], first=FIRST, num_local=LOCAL)
    with pytest.raises(ValueError, match="S or more"):
        bucket_score(*arrays[:3], arrays[3][..., 1:], *arrays[4:], first=FIRST, num_local=LOCAL)
    arrays[3] = arrays[3].astype(jnp.int32)
    with pytest.raises(ValueError, match="got planes, .* expected float32 twice, uint8 or uint16"):
        bucket_score(*arrays, first=FIRST, num_local=LOCAL)
    with pytest.raises(ValueError, match="got num_warps=2, expected 4, 8 or 16"):
        pallas_triton.Config(num_warps=2)
