"""The estimate's best candidates and the list around them, of every implementation against NumPy loops."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._triton.kth_best import held
from pallas_kernels.choose.pariskv.rerank import Regions, estimates, pallas_triton
from pallas_kernels.formats.key_codes import LEVEL, LEVELS, parts_of_rows
from pallas_kernels.formats.key_codes import rows as rows_of
from tests.pallas_kernels.cases import NEEDS_GPU, compiled, every_body, implementations, one_shape

REGIONS = Regions(sinks=3, best=10, tail=20, size=50)
SCALE = 0.25


def run(name, config=None, regions=REGIONS):
    fixed = {"regions": regions, "scale": SCALE}
    if name == "pallas_triton" and config is not None:
        return compiled(pallas_triton.rerank, **fixed, config=config)
    table = implementations("rerank", config=config or pallas_triton.Config(part=16, parts=2))
    return compiled(table[name], **fixed)


def problem(seed, *, dim=32, slots=200, room=70, cursor=(200, 190), stop=(150, 170), count=((70, 33), (5, 0)), ties=False):
    """Codes of random keys with holes in the second head; entries that are no candidates, and empty slots, hold garbage."""
    rng = np.random.default_rng(seed)
    rows, heads = np.shape(count)
    query = rng.normal(size=(rows, heads, dim)).astype(np.float32)
    magnitudes = rng.integers(0, 256, (rows, heads, slots, dim // 2)).astype(np.uint8)
    weight = np.abs(rng.normal(size=(rows, heads, slots, dim // 8)))
    if ties:
        query, weight[:] = np.round(3 * query), 1
        magnitudes[:, :, 5:] = magnitudes[:, :, 5:8][:, :, rng.integers(0, 3, slots - 5)]
    position = np.broadcast_to(np.arange(slots, dtype=np.int32), (rows, heads, slots)).copy()
    position[:, 1, ::7] = -1
    zone = (position >= 0) & (np.arange(slots) >= REGIONS.sinks) & (np.arange(slots) < np.array(stop)[:, None, None])
    weight[position < 0] = np.nan
    listed = np.full((rows, heads, room), -(2**31), np.int32)
    for b, h in np.ndindex(rows, heads):
        held = np.flatnonzero(zone[b, h])
        listed[b, h, : count[b][h]] = np.sort(rng.permutation(held)[: count[b][h]])
    whole = (
        listed,
        np.array(count, np.int32),
        rows_of(jnp.asarray(magnitudes), jnp.asarray(weight, jnp.bfloat16)),
        position,
        np.array(cursor, np.int32),
        np.array(stop, np.int32),
    )
    return jnp.asarray(query), *(jnp.asarray(x) for x in whole)


def oracle(query, listed, count, rows, position, cursor, stop, budget, enough):
    """Slots that one list attends to; arrays without their first two axes."""
    slots = np.arange(len(position))
    magnitudes, weight = (np.asarray(x) for x in parts_of_rows(jnp.asarray(rows)))
    weight = weight.astype(np.float64)
    held = (position >= 0) & (slots < cursor)
    if cursor < enough or stop <= REGIONS.sinks:
        return set(np.flatnonzero(held & (slots < REGIONS.size)).tolist())
    score = {}
    for slot in listed[:count].tolist():
        codes = np.stack([magnitudes[slot] & 15, magnitudes[slot] >> 4], axis=1).reshape(-1)
        direction = np.where(codes & 8, 1, -1) * np.array(LEVELS)[codes & 7]
        score[slot] = (direction * query).reshape(-1, 8).sum(axis=1) @ weight[slot] * SCALE * LEVEL
    best = sorted(score, key=lambda slot: (-round(score[slot], 5), slot))[:budget]
    near = (slots < REGIONS.sinks) | ((slots >= stop) & (slots < stop + REGIONS.tail))
    return set(best) | set(np.flatnonzero(held & near).tolist())


@every_body
@pytest.mark.parametrize("dim", one_shape(32, 128))
def test_estimates_equal_float64(name, dim):
    """Against float64. Behind the candidates they are -inf, and an estimate that is no number cannot be chosen."""
    query, listed, count, rows, *_ = problem(3, dim=dim)
    magnitudes, weight = (np.asarray(x) for x in parts_of_rows(rows))
    codes = np.stack([magnitudes & 15, magnitudes >> 4], axis=-1).reshape(*magnitudes.shape[:3], dim // 8, 8)
    direction = np.where(codes & 8, 1, -1) * np.array(LEVELS)[codes & 7]
    parts = (direction * np.asarray(query, np.float64).reshape(*query.shape[:2], 1, -1, 8)).sum(axis=-1)
    want = (parts * weight.astype(np.float64)).sum(axis=-1) * SCALE * LEVEL
    if name == "interpreted":
        estimate = compiled(pallas_triton.estimates, scale=SCALE, interpret=True)
    else:
        estimate = compiled(estimates, scale=SCALE, implementation=name)
    got = estimate(query, listed, count, rows)
    assert got.dtype == jnp.float32 and got.shape == listed.shape
    for b, h in np.ndindex(count.shape):
        n = int(count[b, h])
        np.testing.assert_allclose(got[b, h, :n], want[b, h][np.asarray(listed[b, h, :n])], rtol=1e-4, atol=1e-4)
        assert np.all(np.asarray(got[b, h, n:]) == -np.inf)
    undefined = np.asarray(estimate(jnp.full_like(query, jnp.nan), listed, count, rows))
    assert np.all(np.isnan(undefined) | (undefined == -np.inf))


def compare(arrays, got, budget, enough):
    slots, mask = (np.asarray(x) for x in got)
    assert slots.dtype == np.int32 and mask.dtype == bool and slots.shape == mask.shape
    plain = [np.asarray(x) for x in arrays]
    plain[0] = plain[0].astype(np.float64)
    for b, h in np.ndindex(slots.shape[:2]):
        one = [x[b, h] for x in plain[:5]] + [x[b] for x in plain[5:]]
        listed = slots[b, h][mask[b, h]].tolist()
        assert len(set(listed)) == len(listed)
        assert set(listed) == oracle(*one, budget, enough)
    assert slots.min() >= 0 and slots.max() < arrays[4].shape[2]


@every_body
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("dim", "budget"), one_shape((32, 10), (128, 7)))
def test_list_equals_loops(name, ties, dim, budget):
    arrays = problem(dim, dim=dim, ties=ties)
    compare(arrays, run(name)(*arrays, jnp.int32(budget), jnp.int32(60)), budget, 60)


@every_body
def test_rows_with_few_tokens_list_all_tokens(name):
    """A row with few tokens and a row without a zone list all their tokens."""
    arrays = problem(1, cursor=(45, 45), stop=(40, 3), count=((20, 20), (0, 0)))
    for enough in (46, 45):
        compare(arrays, run(name)(*arrays, jnp.int32(5), jnp.int32(enough)), 5, enough)


@pytest.mark.thorough
@pytest.mark.parametrize("part, parts", [(16, 4), (32, 1), (16, 1), (128, 1)])
def test_programs_of_any_size_agree_interpreted(part, parts):
    """Programs that pass on all of their candidates, and programs that pass on the best of several parts."""
    arrays = problem(2, ties=True)
    compare(arrays, run("interpreted", pallas_triton.Config(part, parts))(*arrays, jnp.int32(9), jnp.int32(60)), 9, 60)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["random", "ties", "equal", "few"])
@pytest.mark.parametrize(
    "name, config",
    [
        ("interpreted", (16, 1, 4, 4)),
        pytest.param("interpreted", (128, 4, 4, 32), marks=pytest.mark.thorough),
        pytest.param("pallas_triton", (16, 1, 1, 4), marks=NEEDS_GPU),
    ],
)
def test_searching_chunks_first_finds_the_same_candidates(kind, name, config):
    """Searching chunks by their best estimate, then their candidates, finds what one search finds."""
    regions = Regions(sinks=3, best=13, tail=20, size=60)
    count = (((12, 14) if kind == "few" else (900, 500)),)
    arrays = list(problem(0, slots=1200, room=900, cursor=(1190,), stop=(1120,), count=count, ties=kind in ("ties", "equal")))
    if kind == "equal":
        arrays[3] = jnp.broadcast_to(arrays[3][:, :, 5:6], arrays[3].shape)
    cut = pallas_triton.Config(*config)
    assert held(900, regions.best, cut.chunk)[0] > 0
    plain, cut_up = run("xla", None, regions), run(name, cut, regions)
    for budget in (13, 5, 1):
        want, got = (x(*arrays, jnp.int32(budget), jnp.int32(60)) for x in (plain, cut_up))
        for head in range(2):
            a, b = (set(np.asarray(x[0][0, head])[np.asarray(x[1][0, head])].tolist()) for x in (want, got))
            assert a == b


@every_body
def test_infinite_and_undefined_estimates(name):
    """An estimate of -inf is an estimate; candidates without one (NaN) are not listed."""
    arrays = list(problem(3, count=((4, 4), (4, 4))))
    slots = np.asarray(arrays[1])[..., :2]
    magnitudes, weight = parts_of_rows(arrays[3])
    weight = np.array(weight, np.float32)
    direction = jnp.zeros_like(magnitudes)  # all negative
    for b, h in np.ndindex(2, 2):
        weight[b, h, slots[b, h, 0]], weight[b, h, slots[b, h, 1]] = np.inf, np.nan
    arrays[0], arrays[3] = jnp.ones_like(arrays[0]), rows_of(direction, jnp.asarray(weight, jnp.bfloat16))
    listed, mask = run(name)(*arrays, jnp.int32(10), jnp.int32(60))
    for b, h in np.ndindex(2, 2):
        best = np.asarray(listed[b, h])[3:13][np.asarray(mask[b, h])[3:13]]
        assert sorted(best.tolist()) == np.delete(np.asarray(arrays[1])[b, h, :4], 1).tolist()


def test_short_caches_take_the_plain_way():
    """A list longer than the cache: each slot at most once, and as long as the cache."""
    regions = Regions(sinks=3, best=30, tail=20, size=60)
    arrays = problem(5, slots=48, cursor=(48, 48), stop=(30, 30), count=((20, 20), (20, 20)))
    listed, mask = run("xla", regions=regions)(*arrays, 30, 10)
    assert listed.shape == (2, 2, 48)
    for b, h in np.ndindex(2, 2):
        picked = np.asarray(listed[b, h])[np.asarray(mask[b, h])].tolist()
        assert len(picked) == len(set(picked))


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="size of at least 33"):
        Regions(sinks=3, best=10, tail=20, size=32)
    with pytest.raises(ValueError, match="expected a part of at least 64 at head_dim 32"):
        run("pallas_triton", pallas_triton.Config(part=32, num_warps=4))(*problem(6), 5, 60)
