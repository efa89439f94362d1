"""`sweep` is a loop over `generate`, in one compile per group of equal structure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.sweep import group_by_structure
from kvjax.methods import H2O, Full, HeadKV, KeyDiff, Quest, SnapKV, StreamingLLM
from kvjax.wrappers import LayerBudgets, Periodic, Stages, Twilight
from tests import harness
from tests.harness import TRACES, group, padded, prompts, repeated, small, tiny_params
from tests.kvjax.cases import ONE, N, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")
read = functools.partial(harness.read, config=ONE)  # one layer, which halves the programs


def quest(budget, capacity=12):
    return Quest(budget=budget, capacity=capacity, page_size=4, num_dense_layers=0)


SETTINGS = {
    "full": [Full(), Full()],
    "snapkv": [SnapKV(budget=b, capacity=12, obs_window=5) for b in (7, 12)],
    "h2o": [H2O(budget=b, capacity=12, num_recent=r) for b, r in ((12, 2), (8, 5))],
    "keydiff": [KeyDiff(budget=b, capacity=12, block=8) for b in (12, 5)],
    "streamingllm": [small(StreamingLLM, budget=b, capacity=12, chunk=8) for b in (6, 12)],
    "quest": [quest(b) for b in (4, 12)],
    "stages": [  # in the programs of `WRAPPERS`
        Stages(evict=SnapKV(budget=b, capacity=20, obs_window=5), retrieve=quest(r, 8)) for b, r in ((20, 8), (10, 4))
    ],
    "periodic": [Periodic(evict=SnapKV(budget=12, obs_window=5), budget=b, capacity=12, interval=2) for b in (7, 12)],
    "headkv": [HeadKV(budget=b, capacity=12, obs_window=5, scores=((1.0, 4.0),)) for b in (7, 12)],
    "layer_budgets": [LayerBudgets(method=SnapKV(budget=b, capacity=20, obs_window=5), shares=(0.6,)) for b in (10, 20)],
    "twilight": [Twilight(method=quest(12), mass=mass) for mass in (0.3, 0.9)],
}


def run(methods, **options):
    tokens, lengths = padded(prompts())
    return kvjax.sweep(tiny_params(), tokens, methods, lengths=lengths, config=ONE, **options)


@pytest.mark.parametrize("name", repeated([group(name) for name in SETTINGS], but=("stages",)))
def test_sweep_equals_a_loop(name):
    methods = SETTINGS[name]
    traces = len(TRACES)
    results = run(methods, max_new_tokens=N, eos_token_ids=())
    assert len(TRACES) == traces + 2, "one compile: the prompt once, the decode step once"
    for method, result in zip(methods, results, strict=True):
        alone = go_on(read(method))
        np.testing.assert_array_equal(result.tokens, alone.tokens)
        np.testing.assert_array_equal(result.num_tokens, alone.num_tokens)
        np.testing.assert_allclose(result.stats.attended, alone.stats.attended)
        np.testing.assert_allclose(result.stats.bytes_read, alone.stats.bytes_read)
        assert result.method is method and result.group == 0
    if name != "full":
        assert not np.array_equal(results[0].stats.attended, results[1].stats.attended)


def test_settings_are_grouped_by_structure():
    methods = [quest(4), Full(), quest(8), SnapKV(budget=8, capacity=12, obs_window=5), quest(12)]
    assert group_by_structure(methods) == [[0, 2, 4], [1], [3]]
    assert group_by_structure([Quest(budget=16), Quest(budget=32)]) == [[0], [1]], "capacity follows the budget"


@pytest.mark.slow
def test_groups_are_reported_and_results_keep_their_order():
    said = []
    methods = [quest(4), Full(), quest(12)]
    results = run(methods, max_new_tokens=5, eos_token_ids=(), report=said.append)
    assert [result.group for result in results] == [0, 1, 0]
    assert [result.method for result in results] == methods
    assert said[0] == "3 settings in 2 groups of equal structure (one compile each): 2 x Quest, 1 x Full"
    assert said[1].startswith("group 1/2: Quest(") and said[2].startswith("group 2/2: Full(")


@pytest.mark.slow
def test_questions_follow_compression():
    questions = [[5, 9, 2], [8, 1], [4]]
    methods = SETTINGS["snapkv"]
    for method, result in zip(methods, run(methods, max_new_tokens=5, questions=questions, eos_token_ids=()), strict=True):
        cache = kvjax.extend(tiny_params(), read(method), questions)
        alone = kvjax.generate(tiny_params(), cache, max_new_tokens=5, eos_token_ids=())
        np.testing.assert_array_equal(result.tokens, alone.tokens)


@pytest.mark.slow
def test_rows_end_at_eos():
    free = run([Full()], max_new_tokens=5, eos_token_ids=())[0].tokens
    stop = int(free[0, 2])
    got = run([Full()], max_new_tokens=5, eos_token_ids=[stop])[0]
    first = free[0].tolist().index(stop)
    assert int(got.num_tokens[0]) == first + 1 and (got.tokens[0, first + 1 :] == ONE.eos_token_ids[0]).all()


def test_non_finite_logits_name_the_setting():
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), tiny_params())
    tokens, lengths = padded(prompts())
    with pytest.raises(FloatingPointError, match="not finite under Full"):
        kvjax.sweep(broken, tokens, [Full()], lengths=lengths, config=ONE, max_new_tokens=5)
