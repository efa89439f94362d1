"""Every method against its oracle: float64 loops on one side, the jitted batch on the other, same q, k, v."""

import importlib.util
import pathlib

import numpy as np
import pytest

from tests import harness
from tests.kvjax.cases import STEPS, batch, drive_alike, edges, run, run_in_fours

pytestmark = pytest.mark.usefixtures("quick_compile")
SHAPES = [(2, 1, 64), (2, 4, 16), (1, 8, 128)]  # H, G, D


def test_every_oracle_belongs_to_a_method():
    here = pathlib.Path(__file__).parents[1] / "oracles"
    others = {"__init__", "plain", "rope", "minference", "adaptive_prompt"}  # what oracles share; prompts of `Prefill`
    assert {p.stem for p in here.glob("*.py")} - others == set(harness.NAMES)
    for name in harness.NAMES:
        assert importlib.util.find_spec(f"tests.oracles.{name}") is not None
        assert "kvjax" not in (here / f"{name}.py").read_text().replace("kvjax's names", "")


@pytest.mark.parametrize("name", harness.but_once(harness.ONE_LAYER))
def test_random_rows_at_every_edge(name):
    rows = edges(name, seed=2)
    assert run_in_fours(name, harness.oracle(name).KNOBS, *rows, harness.frequencies(16)) == len(rows[-1]) * STEPS


@pytest.mark.parametrize(
    "heads, groups, dim", [SHAPES[0], *(pytest.param(*x, marks=pytest.mark.thorough) for x in SHAPES[1:])]
)
@pytest.mark.slow
@pytest.mark.parametrize("name", harness.repeated(harness.ONE_LAYER, but=["quest"]))
def test_other_heads_and_dimensions(name, heads, groups, dim):
    q, k, v, lengths = batch(name, heads, groups, dim, seed=groups)
    knobs = harness.knobs_of(name, heads)
    assert run(name, knobs, q, k, v, lengths, harness.frequencies(dim)) == len(lengths) * STEPS


@pytest.mark.parametrize(
    "name", harness.repeated(harness.ONE_LAYER, but=[x for x in harness.NAMES if x not in harness.ELSEWHERE])
)
def test_ties_and_zero_keys_equal_the_oracle(name):
    """Small whole numbers and no rotation, so that equal keys give exactly equal scores on both sides."""
    q, k, v, lengths = edges(name, seed=9)
    rng, dim = np.random.default_rng(2), q.shape[-1]
    alphabet = np.concatenate([np.eye(dim)[:5] * 4, -np.eye(dim)[:3] * 4, np.zeros((2, dim))])
    k = alphabet[rng.integers(0, len(alphabet), k.shape[:3])].astype(np.float32)
    k[-1] = 0  # one row, the longest, with nothing but zero keys
    q = rng.integers(-2, 3, q.shape).astype(np.float32)
    run_in_fours(name, harness.oracle(name).KNOBS, q, k, v, lengths, np.zeros(dim // 2, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", harness.repeated(harness.ONE_LAYER, but=("h2o", "quest")))
def test_hundreds_of_decode_steps_equal_the_oracle(name):
    """Hundreds of decode steps: errors in eviction order or metadata would pile up."""
    lengths = np.array([33, 7])
    q, k, v = harness.random_tokens(5, 2, 1, 2, 33 + 220, 16)
    run(name, harness.knobs_of(name, 1), q, k, v, lengths, harness.frequencies(16))


@pytest.mark.parametrize("name", harness.law([x for x in harness.ONE_LAYER if "budget" in harness.oracle(x.values[0]).KNOBS]))
def test_budget_is_traced_below_its_capacity(name):
    """A budget under a larger static capacity does what it does alone."""
    knobs = harness.oracle(name).KNOBS
    less, fields = {**knobs, "budget": 2 * knobs["budget"] // 3}, {"capacity": knobs["budget"]}
    run_in_fours(name, less, *edges(name, seed=4), harness.frequencies(16), fields)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [x for x in harness.ONE_LAYER if "budget" in harness.oracle(x.values[0]).KNOBS])
def test_budget_is_traced_below_a_capacity_of_the_whole_row(name):
    """So that a sweep may have budgets for every row under one capacity; api/test_sweep.py shows it by default."""
    run_in_fours(name, harness.oracle(name).KNOBS, *edges(name, seed=4), harness.frequencies(16), {"capacity": 96})


# Settings beside the example's, and fields that the oracle does not have.
VARIANTS = {
    "snapkv": [({"kernel": 1}, {}), ({"kernel": 7}, {})],
    "h2o": [({"num_recent": 1}, {}), ({"num_recent": 11}, {})],
    "selfextend": [  # chunks below and above the window, which begin anywhere in a group
        ({"group_size": min(window, 4), "window": window}, {"chunk": chunk})
        for chunk, windows in ((7, (1, 4, 12)), *((chunk, (4, 16)) for chunk in (1, 16, 40)))
        for window in windows
    ],
    "tokenselect": [
        *(({"kernel": kernel}, {}) for kernel in (2, 3, 6, 32)),
        *((knobs, {}) for knobs in ({"num_local": 9, "chunk": 4}, {"num_sink": 0, "chunk": 3}, {"budget": 1})),
    ],
    "oracle": [
        ({"by": by, "heads": heads, "mass": mass}, {})
        for by, heads, mass in (
            ("output", "sum", 1.0),
            ("attention", "each", 0.6),
            ("random", "sum", 1.0),
            ("output", "each", 0.9),
        )
    ],
    "pariskv": [
        *((knobs, {}) for knobs in ({"seed": 3}, {"rho": 1.0, "beta": 1.0}, {"num_sink": 0}, {"dense_below": 0})),
        *((knobs, {}) for knobs in ({"dense_below": 14, "budget": 9}, {"dense_below": 0, "buffer": 20, "budget": 1})),
    ],
    "mosaickv": [
        *(({"channels": 0.5}, {}), ({"segment": 64}, {}), ({"strategy": "dynamic", "buffer": 16}, {})),
        *(({"block_size": 8, "fraction": 0.1}, {}), ({"block_size": 2, "buffer": 2, "channels": 0.125}, {})),
        *(({"fraction": 0.01}, {"capacity": 0.3}), ({"fraction": 0.45}, {"capacity": 0.5})),
    ],
    "sentencekv": [
        (knobs, {})
        for knobs in (
            {"prefilter": "kv_head"},
            {"obs_window": 16, "kernel": 5},
            {"open_cap": 5},
            {"open_cap": 1},
            {"keep_factor": 1.5},
        )
    ],
}
ALWAYS = {"h2o": 2, "oracle": 1, "selfextend": 1}  # how many of them do not need --thorough


@pytest.mark.parametrize(
    ("name", "knobs", "fields"),
    [
        pytest.param(
            name,
            *setting,
            marks=[pytest.mark.xdist_group(name), *[pytest.mark.thorough] * (at >= ALWAYS.get(name, 0))],
            id=f"{name}-{at}",
        )
        for name, settings in VARIANTS.items()
        for at, setting in enumerate(settings)
    ],
)
def test_variants_equal_the_oracle(name, knobs, fields):
    run_in_fours(name, {**harness.oracle(name).KNOBS, **knobs}, *edges(name, seed=6), harness.frequencies(16), fields)


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        *(harness.group(name, {}) for name in ("quest", "snapkv", "sentencekv")),
        harness.group("mosaickv", {"fraction": 0.1, "capacity": 0.3}),
        harness.group("pariskv", {"budget": 1, "capacity": 5}),
    ],
)
def test_planted_needle_is_attended(name, knobs):
    """One key along the query direction, four times as long, is attended wherever it lies."""
    prompt, dim = 40, 16
    spots = np.array([0, 3, 4, 11, 17, 24, 31, 34])
    q, k, v = harness.random_tokens(8, len(spots), 2, 2, prompt + 1, dim)
    direction = np.random.default_rng(0).normal(size=dim)
    direction = 4 * direction / np.linalg.norm(direction)
    inv_freq = np.zeros(dim // 2, np.float32)  # directions must survive to be planted
    for row, spot in enumerate(spots):
        q[row, :, :, -6:] = direction  # the observation window and the decoded token
        k[row, :, spot] = 4 * direction
    for four in (slice(0, 4), slice(4, 8)):
        got = drive_alike(harness.example(name, **knobs), q[four], k[four], v[four], [prompt] * 4, inv_freq)
        for row, spot in enumerate(spots[four]):
            assert got.attended[0, row, :, spot].all(), f"{name}: needle at {spot}"
            assert (got.attended[0, row].sum(axis=-1) < prompt / 2).all()
