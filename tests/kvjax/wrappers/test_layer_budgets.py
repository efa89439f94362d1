"""Unequal budgets: `HeadKV`, `DuoAttention`, the files of their scores, and `LayerBudgets`; see test_prompt_eviction.py."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.decoding.prefill import run_prefill
from kvjax.methods import H2O, Chess, DuoAttention, Full, HeadKV, KeyDiff, Knorm, Quest, SnapKV, StreamingLLM
from kvjax.testing.layer import stored
from kvjax.testing.model import TinyModel
from kvjax.wrappers import LayerBudgets, Periodic, PerLayer, Stages, layer_shares
from tests.oracles.duoattention import streaming
from tests.oracles.headkv import budget_of

CONFIG = TinyModel(num_layers=2, num_q_heads=4, num_kv_heads=2)
SCORES = ((1.0, 4.0), (2.0, 1.0))


def budgets(method, layers=2):
    return [np.asarray(method.for_layer(layer, layers).budget).tolist() for layer in range(layers)]


# ---- HeadKV -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget, window, beta", [(1024, 32, 1.2), (64, 32, 1.005), (128, 8, 10.0), (8, 8, 2.0), (9, 1, 1.0)])
def test_budgets_of_heads_have_the_mean_that_is_asked_for(budget, window, beta):
    rng = np.random.default_rng(0)
    scores = tuple(tuple(row) for row in rng.exponential(size=(5, 8)).tolist())
    method = HeadKV(budget=budget, obs_window=window, beta=beta, scores=scores)
    found = budgets(method, 5)
    want = [[budget_of(layer, head, budget, window, beta, scores) for head in range(8)] for layer in range(5)]
    assert found == want and min(map(min, found)) >= window
    assert abs(np.mean(found) - budget) < 0.5
    assert [method.for_layer(layer, 5).capacity for layer in range(5)] == [max(row) for row in found]


def test_periodic_layers_have_the_budgets_of_heads():
    method = Periodic(evict=HeadKV(budget=64, scores=SCORES), budget=48, interval=8)
    for layer in range(2):
        made = method.for_layer(layer, 2)
        np.testing.assert_array_equal(made.evict.budget, budgets(HeadKV(budget=64, scores=SCORES))[layer])
        np.testing.assert_array_equal(made.budget, budgets(HeadKV(budget=48, scores=SCORES))[layer])
        assert made.capacity == made.budget.max()


@pytest.mark.parametrize(
    "scores, message",
    [
        (None, "HeadKV: scores must have a number for each KV head of each layer, got None; kvjax.head_scores reads"),
        (SCORES[:1], "HeadKV: scores must have as many numbers in each of the model's 2 layers, got 1 layers of 2"),
        (((1.0, 2.0), (1.0,)), "in each of the model's 2 layers, got 2 layers of 1 or 2 numbers"),
        (((1.0, 2.0, 3.0),) * 2, "HeadKV: scores must have a number for each of the model's 2 KV heads, got 3 in each layer"),
        (((0.0, 0.0),) * 2, "HeadKV: scores must tell heads apart, got zeros alone"),
    ],
)
def test_scores_of_another_model_are_refused(scores, message):
    method = HeadKV(scores=scores)
    for wrapped in (method, PerLayer(layers={}, default=method), Periodic(evict=method)):
        calls = (
            lambda wrapped=wrapped: kvjax.prefill({}, [[1, 2]], config=CONFIG, method=wrapped, max_new_tokens=2),
            lambda wrapped=wrapped: kvjax.memory_needed(wrapped, CONFIG, batch=1, prompt_slots=8, max_new_tokens=2),
        )
        for call in calls:
            with pytest.raises(ValueError, match=re.escape(message)) as error:
                call()
            assert "\n" not in str(error.value)


def test_scores_are_numbers_of_layers():
    with pytest.raises(ValueError, match="HeadKV: scores must be a tuple of tuples of numbers, each of at least 0 or None"):
        HeadKV(scores=((1.0, -1.0),))


# ---- DuoAttention -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sparsity", [0.0, 0.25, 0.6, 1.0])
def test_the_heads_with_the_lowest_scores_stream(sparsity):
    rng = np.random.default_rng(3)
    scores = tuple(tuple(row) for row in rng.integers(0, 4, (5, 8)).astype(float).tolist())  # some are equal
    method = DuoAttention(scores=scores, sparsity=sparsity)
    found = {(layer, head) for layer in range(5) for head in range(8) if method.for_layer(layer, 5).streams[head]}
    assert found == streaming(scores, sparsity) and len(found) == round(40 * sparsity)


def test_a_layer_whose_heads_all_stream_is_small():
    tiny = TinyModel(num_layers=2)
    method = DuoAttention(scores=((1.0, 2.0), (3.0, 9.0)), num_sink=2, num_recent=4)
    tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 64), (1,)))
    read = functools.partial(run_prefill, method=method, model=tiny, max_new_tokens=5, chunk_size=64)
    cache = jax.eval_shape(read, jax.eval_shape(tiny.random_params), tokens, length)
    assert [stored(layer).num_slots for layer in cache.layers] == [6 + 5, 64 + 5]


# ---- files of scores ----------------------------------------------------------------------------------------------


def json_of(table):
    return json.dumps({f"{at}-{head}": [x, 3 * x] for at, row in enumerate(table) for head, x in enumerate(row)}) + "\n"


def test_scores_are_read_from_a_file(tmp_path):
    """Lists are their mean, a KV head has the mean of its query heads, and entries stand in any order."""
    file = tmp_path / "heads.json"
    file.write_text(json_of([[1, 3, 4, 4], [0, 0.5, 2, 4]]))
    assert kvjax.head_scores(file, CONFIG) == ((4.0, 8.0), (0.5, 6.0))
    file.write_text(json.dumps(dict(sorted(json.loads(file.read_text()).items(), reverse=True))))
    assert kvjax.head_scores(str(file), CONFIG) == ((4.0, 8.0), (0.5, 6.0))
    file.write_text(json_of([[1, 3], [0, 0.5]]))
    assert kvjax.head_scores(file, CONFIG) == ((2.0, 6.0), (0.0, 1.0))
    table = tmp_path / "full_attention_heads.tsv"
    table.write_text("1.2\t0.25\n-0.1\t0.5\n")
    assert kvjax.head_scores(table, CONFIG) == ((1.0, 0.25), (0.0, 0.5))
    HeadKV(scores=kvjax.head_scores(table, CONFIG)).for_layer(1, 2)


@pytest.mark.parametrize(
    "text, message",
    [
        (json_of([[1, 2, 3], [4, 5, 6]]), "has scores for 2 layers of 3 heads, the model has 2 layers of 4 query heads"),
        ("nothing", 'holds no head scores, expected {"LAYER-HEAD": .number, ...].*, got: Expecting value'),
        ("{}", "holds no head scores, .* got: no entry 0-0"),
        ('{"0-0": [1], "0-1": [-1]}', "holds no head scores, .* got: 0-1: .-1."),
        ('{"0-0": [1], "0-1": [NaN]}', "holds no head scores"),
        ('{"0-0": [1], "1-1": [1]}', "holds no head scores, .* got: no entry 0-1"),
    ],
)
@pytest.mark.filterwarnings("ignore:Mean of empty slice", "ignore:invalid value")
def test_other_files_are_refused_in_a_sentence(tmp_path, text, message):
    file = tmp_path / "heads.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        kvjax.head_scores(file, CONFIG)
    assert str(error.value).startswith(str(file)) and "\n" not in str(error.value)


def test_a_missing_or_empty_file_of_scores_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no head scores in .*heads.json: expected a file"):
        kvjax.head_scores(tmp_path / "heads.json", CONFIG)
    table = tmp_path / "heads.tsv"
    table.write_text("1\t2\n3\n")
    with pytest.raises(ValueError, match="heads.tsv holds no head scores"):
        kvjax.head_scores(table, CONFIG)


# ---- LayerBudgets -------------------------------------------------------------------------------------------------


def test_shares_belong_to_the_best_groups():
    """Against all ways to give each layer a group."""
    rng = np.random.default_rng(1)
    for size in (3, 4, 6, 7):
        values = rng.uniform(size=size)

        def spread(groups, values=values):
            parts = [values[np.array(groups) == group] for group in range(3)]
            return sum(float(((part - part.mean()) ** 2).sum()) if len(part) else np.inf for part in parts)

        best = np.array(min(itertools.product(range(3), repeat=size), key=spread))
        similar = best == max(range(3), key=lambda group: values[best == group].mean())
        found = layer_shares(values, 0.25)
        np.testing.assert_array_equal(np.array(found) == 0.25, similar)
        assert np.mean(found) == pytest.approx(1) and len(set(found)) == 2
    assert layer_shares([0.2, 0.9, 0.91, 0.5], 1.0) == (1.0,) * 4


@pytest.mark.parametrize(
    "given, message",
    [
        (([0.5, 0.5, 0.7], 0.3), "at least 3 different finite numbers, one for each layer, got .0.5, 0.5, 0.7"),
        (([0.5, np.nan, 0.7], 0.3), "at least 3 different finite numbers"),
        (([0.5, 0.6, 0.7], 0.0), "share must be above 0 and at most 1, got 0.0"),
    ],
)
def test_shares_that_cannot_be_made(given, message):
    with pytest.raises(ValueError, match=message):
        layer_shares(*given)


SHARED = [
    SnapKV(budget=64), H2O(budget=64, num_recent=8), StreamingLLM(budget=64), Quest(budget=64, num_dense_layers=0),
    KeyDiff(budget=64),
]  # fmt: skip


@pytest.mark.parametrize("method", SHARED, ids=lambda x: type(x).__name__)
def test_layers_have_their_shares(method):
    made = LayerBudgets(method=method, shares=(0.5, 1.0, 1.5))
    found = [made.for_layer(layer, 3) for layer in range(3)]
    assert [x.budget for x in found] == [x.capacity for x in found] == [32, 64, 96]
    assert found[1] == method.for_layer(1, 3)


def test_every_budget_in_a_method_is_multiplied():
    evict = Periodic(evict=SnapKV(budget=64), budget=48, interval=8)
    made = LayerBudgets(method=evict, shares=(2.0, 1.0)).for_layer(0, 2)
    assert (made.evict.budget, made.budget, made.capacity, made.interval) == (128, 96, 96, 8)
    mixed = PerLayer(layers={0: Full()}, default=Knorm(budget=10))
    made = LayerBudgets(method=mixed, shares=(1.0, 0.5))
    assert made.for_layer(0, 2) == Full() and made.for_layer(1, 2).budget == 5
    stages = Stages(evict=SnapKV(budget=64), retrieve=Quest(budget=32, num_dense_layers=0))
    made = LayerBudgets(method=stages, shares=(0.5, 1.5)).for_layer(1, 2)
    assert (made.evict.budget, made.retrieve.budget) == (96, 48)


def test_a_traced_budget_is_shared():
    def sizes(budget):
        made = LayerBudgets(method=SnapKV(budget=budget, capacity=1000), shares=(0.35, 1.65))
        return jnp.stack([made.for_layer(layer, 2).budget for layer in range(2)])

    given = np.array([100, 333, 1000])
    want = np.floor(np.outer(given, (0.35, 1.65)) * (1 + 1e-6))
    np.testing.assert_array_equal(jax.vmap(sizes)(jnp.asarray(given, jnp.int32)), want)


@pytest.mark.parametrize(
    "make, message",
    [
        ({"method": Full()}, "LayerBudgets: method must have a budget in tokens, but Full has none"),
        ({"method": Chess()}, "LayerBudgets: Chess chooses for all layers at once"),
        ({"method": "snapkv"}, "LayerBudgets: method must be a kvjax method, got the name"),
        ({"method": SnapKV(budget=64), "shares": (0.4, 1.6)}, "SnapKV: budget must be .* 32 tokens .*, got 25"),
        ({"shares": ()}, "LayerBudgets: shares must be a tuple of numbers, each above 0, got"),
        ({"shares": (0.0, 2.0)}, "LayerBudgets: shares must be .* each above 0, got"),
        ({"shares": (0.5, 1.5, 1.0)}, "LayerBudgets: shares must have a number for each of the model's 2 layers, got 3"),
    ],
)
def test_wrong_layer_budgets_are_refused(make, message):
    with pytest.raises(ValueError, match=message) as error:
        LayerBudgets(**{"method": SnapKV(), "shares": (1.0, 1.0), **make}).for_layer(0, 2)
    assert "\n" not in str(error.value)
