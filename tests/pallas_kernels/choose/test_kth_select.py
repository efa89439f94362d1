"""Selection by score against NumPy: every implementation, ties, holes, any division of the work."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.selection import compact as compact_slots
from kvjax.selection import top_slots
from pallas_kernels.choose.kth_select import KTH_SELECT, kth_select, kth_select_mask, pallas_triton
from tests.pallas_kernels import cases

LONG = pallas_triton.Config(direct=16, nodes=32, width=8, depth=2, tile=16, hold=16, programs=6)
MANY = pallas_triton.Config(direct=16, nodes=32, width=8, depth=2, tile=8, hold=16, programs=200)  # segments, packed
SELECT = {
    "xla": functools.partial(kth_select, implementation="xla"),
    "interpreted": cases.implementations("kth_select")["interpreted"],
    "interpreted long": cases.implementations("kth_select", config=LONG)["interpreted"],
    "interpreted, many segments": cases.implementations("kth_select", config=MANY)["interpreted"],
    "pallas_triton": functools.partial(kth_select, implementation="pallas_triton"),
    "jax_triton": functools.partial(kth_select, implementation="jax_triton"),
} | cases.on_hopper(kth_select)
MARKS = {"pallas_triton": [cases.NEEDS_GPU], "jax_triton": [cases.NEEDS_GPU, cases.NEEDS_JAX_TRITON]}


@functools.cache
def selecting(name, capacity):
    """One program per implementation and capacity: scores and budgets are its arguments."""
    return jax.jit(lambda score, budget: SELECT[name](score, budget, capacity))


DIVIDED = ("interpreted long", "interpreted, many segments")  # as "interpreted" but for the division of the work
SELECT_NAMES = [pytest.param(x, marks=MARKS.get(x, [])) for x in SELECT if x != cases.MOSAIC]  # which `conftest` adds


def oracle(score, budget, capacity):
    """Lists by a stable sort of each row."""
    slots = np.zeros((*score.shape[:2], capacity), np.int32)
    count = np.zeros(score.shape[:2], np.int32)
    budget = np.broadcast_to(budget, score.shape[:2])
    for r, h in np.ndindex(*score.shape[:2]):
        row = np.where(np.isnan(score[r, h]), -np.inf, score[r, h])
        best = np.argsort(-row, kind="stable")[: np.isfinite(row).sum() + np.isposinf(row).sum()]
        best = np.sort(best[: min(max(budget[r, h], 0), capacity)])
        slots[r, h, : len(best)], count[r, h] = best, len(best)
    return slots, count


def scores(kind, shape, seed=0):
    """Score rows of one kind; row (0, 0) always has holes of -inf and NaN."""
    rng = np.random.default_rng(seed)
    score = rng.normal(size=shape).astype(np.float32)
    if kind == "ties":
        score = np.round(score).astype(np.float32) * rng.choice([-1.0, 1.0], shape).astype(np.float32)
    elif kind == "equal":
        score = np.full(shape, -3.0, np.float32)
    elif kind == "extreme":
        values = np.asarray([np.inf, np.finfo(np.float32).min, np.finfo(np.float32).max, 1e-45, -1e-45, 0.0, -0.0], "f4")
        score = rng.choice(values, shape)
    elif kind == "denormal":
        score = rng.choice(np.asarray([-2e-45, -1e-45, 0.0, -0.0, 1e-45, 2e-45, 1e-40], "f4"), shape)
    elif kind == "sorted":
        score = np.sort(score, axis=-1)
    elif kind == "one segment":
        score[..., -20:] += 100
    elif kind == "one node":
        score[..., ::32] += 100
    elif kind == "forced":
        score[..., 7:300:60] = np.inf
    elif kind == "few":
        score[..., 5:] = -np.inf
    elif kind == "tiny range":
        score = (1 + rng.integers(0, 50, shape) * 2.0**-23).astype(np.float32)
    score[0, 0] = np.where(rng.random(shape[-1]) < 0.3, rng.choice(np.asarray([-np.inf, np.nan], "f4")), score[0, 0])
    return score


KINDS = ["normal", "ties", "equal", "extreme", "denormal", "sorted", "one segment", "one node", "few", "forced", "tiny range"]


@pytest.mark.parametrize(
    "name", [pytest.param(*x.values, marks=[*x.marks, *[pytest.mark.slow] * (x.values[0] in DIVIDED)]) for x in SELECT_NAMES]
)
@pytest.mark.parametrize(
    "kind", [pytest.param(x, marks=[cases.thorough] * (x in ("sorted", "one segment", "tiny range"))) for x in KINDS]
)
def test_lists_equal_a_stable_sort(name, kind):
    score = scores(kind, (2, 2, 301))
    run = selecting(name, 13)
    budgets = [np.asarray([[0, 3], [7, 13]], np.int32), np.asarray([[-1, 3], [7, 0]], np.int32)]
    if kind == "normal" and "interpreted" not in name:  # a shape of the budget is a program of its own
        budgets += [np.int32(13), np.asarray([[1], [13]], np.int32)]
    for budget in budgets:
        slots, count = run(jnp.asarray(score), jnp.asarray(budget))
        expected = oracle(score, budget, 13)
        assert slots.dtype == count.dtype == jnp.int32
        np.testing.assert_array_equal(count, expected[1])
        np.testing.assert_array_equal(slots, expected[0])


@pytest.mark.parametrize("name", [*SELECT_NAMES[:3], pytest.param(DIVIDED[1], marks=cases.thorough), *SELECT_NAMES[4:]])
@pytest.mark.parametrize(
    ("slots", "budget", "capacity"), cases.one_shape((64, 100, 31), (7, 5, 20), (1, 1, 1), (17, 17, 17), (97, 64, 97))
)
def test_rows_and_lists_of_any_size(name, slots, budget, capacity):
    score = scores("normal", (1, 3, slots))
    run = jax.jit(SELECT[name], static_argnums=(1, 2))
    cases.alike(run(jnp.asarray(score), budget, capacity), oracle(score, budget, capacity))


@pytest.mark.parametrize("name", ["interpreted", "first that runs"])
def test_mask_and_count_agree(name):
    score = jnp.asarray(scores("few", (2, 2, 50)))
    run = functools.partial(pallas_triton.kth_select, interpret=True) if name == "interpreted" else KTH_SELECT.run
    slots, keep, count = jax.jit(run, static_argnums=(1, 2))(score, 9, 12)
    np.testing.assert_array_equal(keep, np.arange(12) < np.asarray(count)[..., None])
    public = jax.jit(kth_select_mask, static_argnums=(1, 2))(score, 9, 12)
    np.testing.assert_array_equal(public[0], slots)
    np.testing.assert_array_equal(public[1], keep)


@pytest.mark.parametrize(
    "budget", [[[0, 3], [5, -1]], *(pytest.param(x, marks=cases.thorough) for x in ([[2, 0]], [[0], [4]]))]
)
@pytest.mark.parametrize("name", ["interpreted", "interpreted long", "interpreted, many segments"])
def test_rows_that_want_nothing_are_not_read(name, budget):
    """Whatever other rows want."""
    score, budget = scores("normal", (2, 2, 301)), np.asarray(budget, np.int32)
    expected = oracle(score, budget, 13)
    score[np.broadcast_to(budget, (2, 2)) <= 0] = np.nan
    cases.alike(selecting(name, 13)(jnp.asarray(score), jnp.asarray(budget)), expected)


def of_shares(logits, lse):
    """Float64: the log of the largest share of each entry, NaN where there is none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (np.float64(logits) - np.log(np.exp(np.float64(lse)).sum(axis=2))[..., None]).max(axis=2)


@pytest.mark.parametrize(  # jax_triton does not take them
    "name", [*SELECT_NAMES[:3], pytest.param("interpreted, many segments", marks=cases.thorough), SELECT_NAMES[-2]]
)
@pytest.mark.parametrize(("group", "slots"), cases.one_shape((3, 301), (1, 17), (8, 90)))
def test_the_largest_shares_of_query_heads(name, group, slots):
    """Of a list all parts are empty but one, and all of another; budgets of no entry and of more than there are."""
    rng = np.random.default_rng(slots)
    logits, lse = rng.normal(size=(2, 3, group, slots)) * 3, rng.normal(size=(2, 3, 5, group)) * 3
    logits[rng.random(logits.shape) < 0.2], logits[0, 0, :, : slots // 2] = -np.inf, -np.inf
    lse[0, 1, 1:], lse[1, 2], logits[1, 2] = -np.inf, -np.inf, -np.inf
    logits, lse = np.float32(logits), np.float32(lse)
    budget = np.asarray([[3, 13, 0], [7, 20, 5]], np.int32)
    options = {"interpret": True, "config": {"interpreted long": LONG, "interpreted, many segments": MANY}.get(name)}
    kernel = functools.partial(pallas_triton.kth_select, **options)
    run = functools.partial(kth_select_mask, implementation=name) if name in KTH_SELECT.implementations else kernel
    slots, keep = jax.jit(run, static_argnums=2)(logits, budget, 13, lse=lse)[:2]
    want, count = oracle(of_shares(logits, lse), budget, 13)
    np.testing.assert_array_equal(slots, want)
    np.testing.assert_array_equal(keep, np.arange(13) < count[..., None])
    assert count[1, 2] == 0 and count[0, 1] > 9


def test_selection_of_valid_slots_of_any_score():
    """`top_slots`: a valid slot beats every invalid one, and the list is no longer than the row."""
    score = np.asarray([[[-np.inf, np.nan, 1.0, np.inf, 2.0]]], np.float32)
    valid = np.asarray([[[True, True, True, True, False]]])
    slots, keep = jax.jit(top_slots, static_argnums=3)(score, valid, 3, 8)
    assert slots.shape == (1, 1, 5) and keep.sum() == 3
    np.testing.assert_array_equal(slots[0, 0, :3], [0, 2, 3])
    listed, keep = jax.jit(compact_slots, static_argnums=1)(valid, 3)
    np.testing.assert_array_equal(listed, [[[0, 1, 2]]])
    assert np.all(keep)


@cases.NEEDS_GPU
@pytest.mark.parametrize("name", SELECT_NAMES[-2:])
@pytest.mark.parametrize(
    ("slots", "capacity"), [(8192, 128), (16_384, 1638), (131_072, 2048), (1_000_003, 2048), (70_001, 8192)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_kth_select_at_full_size(slots, capacity, kind, name):
    score = scores(kind, (1, 2, slots))
    run = jax.jit(SELECT[name], static_argnums=2)
    expected = oracle(score, capacity, capacity)
    for _ in range(3):
        cases.alike(run(jnp.asarray(score), jnp.int32(capacity), capacity), expected)
