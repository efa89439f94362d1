"""`partial_select` against NumPy, on every implementation; interpreted where there is no GPU. All numbers are exact."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.kth_select import pallas_triton as kth
from pallas_kernels.score.infinigen.partial_score import pallas_triton as scores
from tests.pallas_kernels.cases import NAMES, compiled, implementations, one_shape, thorough

SCALE = 0.25
# The usual division takes long to interpret, and the short one has all of its branches.
BODIES = ["interpreted, short", *(pytest.param(x, marks=thorough) if x == "interpreted" else x for x in NAMES)]
LONG = kth.Config(direct=16, nodes=64, tile=32, hold=16, programs=12)


def twice(near):
    """As if a second device had as many."""
    return 2 * near


def run(name, **static):
    """The implementation, with options that make several programs and segments of short rows."""
    static = {"scale": SCALE, "total": twice} | static
    config = scores.Config(block=32, programs=18)
    table = implementations("partial_select", config=config, chosen=LONG)
    short = implementations("partial_select", config=config)["interpreted"]
    return compiled((table | {"interpreted, short": short})[name], **static)


def problem(seed, group=3, channels=5, slots=150, dtype="float32"):
    """Rows that are full, half full, with few tokens, and empty; numbers are whole, and many scores equal."""
    rng = np.random.default_rng(seed)
    query, key = rng.integers(-2, 3, (4, 2, group, channels)), rng.integers(-3, 4, (4, 2, channels, slots + -slots % 16))
    cursor = np.asarray([slots, slots // 2 + 1, 9, 0], np.int32)
    held = (rng.random((4, 2, slots)) < 0.8) & (np.arange(slots) < cursor[:, None, None])
    held[0, :, -1], held[1, 1] = True, False
    held[1, 0, cursor[1] - 1] = False  # a head without the newest token
    empty = np.ones((4, 2, key.shape[3]), bool)
    empty[..., :slots] = ~held | (np.arange(slots) == cursor[:, None, None] - 1)
    key = np.where(empty[:, :, None], np.nan, key)
    position = jnp.asarray(np.where(held, np.arange(slots), -1), jnp.int32)
    return *(jnp.asarray(x, dtype) for x in (query, key)), position, jnp.asarray(cursor)


def oracle(query, key, position, cursor, alpha, budget, capacity):
    """The slots of each list, by plain loops."""
    query, key = (np.asarray(x.astype(jnp.float32), np.float64) for x in (query, key))
    held = np.asarray(position) >= 0
    newest = np.arange(held.shape[2]) == np.asarray(cursor)[:, None, None] - 1
    others = held & ~newest
    logits = SCALE * query @ np.nan_to_num(key[..., : held.shape[2]])
    logits = np.where(others[:, :, None], logits, -np.inf)
    near = np.sum((logits >= logits.max(axis=3, keepdims=True) - alpha) & others[:, :, None], axis=(1, 2, 3))
    lists = {}
    for b, h in np.ndindex(*held.shape[:2]):
        stored = int(others[b, h].sum())
        few = int(2 * near[b]) // (2 * query.shape[1] * query.shape[2])
        wanted = min((stored if stored <= budget else min(few, budget)) + 1, capacity)
        score = np.where(others[b, h], logits[b, h].sum(axis=0), np.where(held[b, h], np.inf, -np.inf))
        best = np.argsort(-score, kind="stable")[:wanted]
        lists[b, h] = sorted(int(slot) for slot in best if held[b, h, slot])
    return lists


def same(got, lists):
    for (b, h), want in lists.items():
        slots, keep = (np.asarray(x)[b, h] for x in got)
        assert keep.sum() == keep[: len(want)].sum() == len(want)
        np.testing.assert_array_equal(slots, want + [0] * (len(slots) - len(want)))


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=thorough)])
@pytest.mark.parametrize(("group", "channels", "slots"), one_shape((3, 5, 150), (1, 16, 97), (4, 25, 130), (12, 51, 160)))
def test_lists_equal_plain_loops(name, dtype, group, channels, slots):
    args, call = problem(slots, group, channels, slots, dtype), run(name, capacity=21, query_heads=4 * group)
    for alpha, budget in ((1.0, 20), (100.0, 20), (3.0, 5), (0.0, 20), (100.0, 0)):
        got = call(*args, jnp.float32(alpha), jnp.int32(budget))
        assert [x.dtype for x in got] == ["int32", bool]
        same(got, oracle(*args, alpha, budget, 21))


@thorough
@pytest.mark.parametrize("name", BODIES)
def test_a_short_list_is_cut_and_a_long_one_holds_all(name):
    args = problem(3)
    for capacity in (4, 160):
        got = run(name, capacity=capacity, query_heads=12)(*args, jnp.float32(100), jnp.int32(200))
        same(got, oracle(*args, 100.0, 200, capacity))
