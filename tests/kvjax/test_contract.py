"""The laws every method obeys, run over everything `kvjax.methods` exports and over examples of the wrappers.

A new method needs nothing here: its oracle declares the small setting it is tested at (see ``harness.example``).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.families import Retrieval
from kvjax.methods import Full, Quest
from kvjax.step import run_step
from tests.harness import (
    ALL,
    METHODS,
    NAMES,
    ONE_LAYER,
    TINY,
    TRACES,
    WRAPPERS,
    any_example,
    drive,
    example,
    frequencies,
    generous,
    group,
    law,
    oracle,
    padded,
    prompts,
    random_tokens,
    read,
    stored,
    tiny_params,
)
from tests.kvjax.cases import QUESTIONS, N, ask, base, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")

LENGTHS = np.array([40, 23, 9, 13])
STEPS = 10
SLOTTED = [x for x in ALL if x in ONE_LAYER or x.values[0] in ("stages", "dense_below")]
SELECTING = [group(name) for name in ("quest", "stages", "dense_below")]
MASKED = SELECTING + [
    group(name) for name in ("tokenselect", "sentencekv", "mosaickv", "pariskv")
]  # Chess: test_chess.py


@functools.cache
def data():
    return random_tokens(11, len(LENGTHS), 2, 2, LENGTHS.max() + STEPS, 16)


def one_layer(method, q=None, k=None, v=None, **options):
    given = [x if y is None else y for x, y in zip(data(), (q, k, v), strict=True)]
    return drive(method, *given, LENGTHS, prompt=int(LENGTHS.max()), **options)


@functools.cache
def plain(name):
    """One layer of the example without any change; the laws compare their variants with it."""
    return one_layer(any_example(name))


def same(got, want, tolerance=1e-5):
    """Assert that two runs of one layer agree; the padding of prompts is not compared."""
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(
            got.prompt[row, :, :, :length], want.prompt[row, :, :, :length], atol=tolerance, rtol=0
        )
    np.testing.assert_allclose(got.outputs, want.outputs, atol=tolerance, rtol=0)
    np.testing.assert_array_equal(got.attended, want.attended)
    np.testing.assert_array_equal(got.kept, want.kept)


def test_every_method_has_an_oracle_and_an_example():
    for name in NAMES:
        module = oracle(name)
        assert isinstance(module.KNOBS, dict) and module.LENGTHS and callable(module.run), name
        assert isinstance(example(name), kvjax.methods.__dict__[type(example(name)).__name__])
        assert type(example(name)).PAPER.startswith("arXiv:")


# ---- one layer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", law(SLOTTED))
def test_empty_slots_are_never_read(name):
    """NaN wherever nothing is stored changes nothing (0 * NaN is NaN, so weights of zero would not do)."""
    same(one_layer(any_example(name), poison=True), plain(name), tolerance=0)


@pytest.mark.parametrize("name", law(SLOTTED))
def test_rows_are_independent(name):
    changed = [x.copy() for x in data()]
    for x in changed:
        x[1:] = x[1:][::-1] * 2 + 1
    got, want = one_layer(any_example(name), *changed), plain(name)
    np.testing.assert_allclose(got.outputs[:, 0], want.outputs[:, 0], atol=1e-6, rtol=0)
    np.testing.assert_array_equal(got.kept[:, 0], want.kept[:, 0])
    assert not np.allclose(got.outputs[:, 1], want.outputs[:, 1])


@pytest.mark.parametrize("name", law(SLOTTED))
def test_permuting_heads_permutes_the_output(name):
    got, want = one_layer(any_example(name), *(x[:, ::-1] for x in data())), plain(name)
    np.testing.assert_allclose(got.outputs[:, :, ::-1], want.outputs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(got.attended[:, :, ::-1], want.attended)


@pytest.mark.parametrize("name", law(SLOTTED))
def test_equal_query_heads_attend_as_one(name):
    """Query heads of a group that are equal give equal outputs, and the newest token is always attended."""
    q = data()[0].copy()
    q[:, :, 1] = q[:, :, 0]
    got = one_layer(any_example(name), q)
    np.testing.assert_array_equal(got.outputs[..., 0, :], got.outputs[..., 1, :])
    for row, length in enumerate(LENGTHS):
        assert all(got.attended[step, row, :, length + step].all() for step in range(STEPS))


@pytest.mark.parametrize("name", law(SLOTTED))
def test_prompt_chunks_do_not_change_results(name):
    own = any_example(name).for_layer(0, 2).max_tokens(in_prompt=True)
    same(one_layer(any_example(name), chunk=7 if own is None else own), plain(name))


@pytest.mark.parametrize("name", law([group(name) for name in ("snapkv", "h2o", "streamingllm", "tokenselect")]))
def test_jit_equals_eager(name):
    q, k, v = data()
    prompt, steps, want = int(LENGTHS.max()), 2, plain(name)
    with jax.disable_jit():
        got = drive(any_example(name), *(x[..., : prompt + steps, :] for x in (q, k, v)), LENGTHS, prompt=prompt)
    np.testing.assert_allclose(got.prompt[0], want.prompt[0], atol=1e-5, rtol=0)
    np.testing.assert_allclose(got.outputs, want.outputs[:steps], atol=1e-5, rtol=0)
    np.testing.assert_array_equal(got.kept, want.kept[:steps, ..., : prompt + steps])


@pytest.mark.parametrize("name", law(SELECTING))
def test_selection_is_sound(name):
    """No slot twice, all valid, never more than the budget nor less than it can have."""
    got = plain(name)
    budget = {"quest": 12, "stages": 8, "dense_below": 20}[name]
    for step, row, head in np.ndindex(STEPS, len(LENGTHS), 2):
        chosen = got.chosen[step, row, head][got.chosen[step, row, head] >= 0]
        assert len(set(chosen.tolist())) == len(chosen)
        assert len(chosen) == got.attended[step, row, head].sum() <= budget
        assert not (got.attended[step, row, head] & ~got.kept[step, row, head]).any()
        if name == "quest":  # full pages but for the newest
            seen = LENGTHS[row] + step + 1
            assert len(chosen) == min(seen, 8 + (seen - 1) % 4 + 1)


@pytest.mark.parametrize("name", [group("quest"), group("stages"), group("dense_below")])
def test_index_updated_equals_index_rebuilt(name):
    method, state = any_example(name), plain(name).state
    inner, aux = {
        "quest": lambda: (method, state.aux),
        "dense_below": lambda: (method.method, state.aux),
        "stages": lambda: (method.retrieve, state.aux[1]),
    }[name]()
    assert isinstance(inner, Retrieval)
    jax.tree.map(np.testing.assert_array_equal, aux, inner.index(state.cache))


@pytest.mark.parametrize("name", law(MASKED))
def test_mask_mode_equals_gather_mode(name):
    same(one_layer(dataclasses.replace(any_example(name), implementation="mask")), plain(name))


@pytest.mark.xdist_group("quest")
def test_stages_after_full_is_the_method_itself():
    same(one_layer(kvjax.Stages(evict=Full(), retrieve=example("quest"))), plain("quest"))


@pytest.mark.xdist_group("stages")
def test_stages_with_every_page_is_the_eviction_alone():
    evict = WRAPPERS["stages"].evict
    everything = kvjax.Stages(evict=evict, retrieve=Quest(budget=96, page_size=4, num_dense_layers=0))
    same(one_layer(everything), one_layer(evict))


@pytest.mark.xdist_group("dense_below")
def test_dense_below_switches_per_row():
    got, quest = plain("dense_below"), one_layer(WRAPPERS["dense_below"].method)
    for step, row in np.ndindex(STEPS, len(LENGTHS)):
        seen = LENGTHS[row] + step + 1
        want = quest.attended[step, row].sum(axis=-1) if seen > 20 else seen
        np.testing.assert_array_equal(got.attended[step, row].sum(axis=-1), want)


@pytest.mark.parametrize("name", law(SLOTTED))
def test_cost_counts_what_is_attended(name):
    """`Cost` is of the state as it stands: what the last step attended, less what it then evicted."""
    got, method = plain(name), any_example(name).for_layer(0, 2)
    cost = method.cost(got.state, None)
    seen = (got.attended[-1] & got.kept[-1]).sum(axis=-1)
    if name == "stages":  # an upper bound where an eviction left holes in pages
        assert (np.asarray(cost.attended) >= seen.mean(axis=1)).all()
    else:
        np.testing.assert_array_equal(cost.attended, seen.mean(axis=1))
        row = 2 * 16 * 4
        cache = stored(got.state)
        extra = (
            np.zeros(len(LENGTHS))
            if method.composable is False
            else np.asarray(method.count(cache, got.state.aux, None)[1]).sum(axis=1)
        )
        if name not in ("tokenselect", "mosaickv"):  # rows of another size, or scans: in their own tests
            np.testing.assert_allclose(cost.bytes_read, seen.sum(axis=1) * row + extra)
    if name == "quest":  # two bounds of every page in use
        np.testing.assert_array_equal(extra, 2 * np.ceil((LENGTHS + STEPS) / 4) * 2 * 16 * 4)
    if name == "h2o":  # one accumulated probability per stored token
        np.testing.assert_array_equal(extra, seen.sum(axis=1) * 4)


# ---- the whole model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", law(ALL))
def test_everything_kept_equals_full(name):
    logits, full = base("full")
    cache = read(generous(name))
    np.testing.assert_allclose(cache.logits, logits, atol=1e-4)
    got = go_on(cache)
    np.testing.assert_array_equal(got.tokens, full.tokens)
    np.testing.assert_allclose(got.cache.logits, full.cache.logits, atol=1e-4)
    assert got.stats.is_no_op.all() and "no effect at this length in 3 of 3 rows" in got.stats.summary()
    np.testing.assert_array_equal(got.stats.attended, got.stats.length)


@pytest.mark.parametrize("name", law([x for x in ALL if x.values[0] != "full"]))
def test_example_does_something(name):
    """The laws above also hold for a method that never leaves anything out. The examples must leave something out."""
    _, got = base(name)
    assert not got.stats.is_no_op[0] and got.stats.selected_fraction[0] < 1
    assert not np.array_equal(got.cache.logits[0], base("full")[1].cache.logits[0])


@pytest.mark.parametrize("name", law(ALL))
def test_ragged_rows_equal_alone(name):
    _, together = base(name)
    # A basis of fewer different tokens than channels is not unique, so MosaicKV's shortest row may pack new tokens otherwise.
    for row, prompt in enumerate(prompts()[:2] if name == "mosaickv" else prompts()):
        alone = go_on(read(any_example(name), [prompt]))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        np.testing.assert_allclose(alone.cache.logits[0], together.cache.logits[row], atol=1e-4)
        assert float(alone.stats.attended[0]) == float(together.stats.attended[row])


@pytest.mark.parametrize("name", law(METHODS))
def test_generating_in_two_calls_equals_one(name):
    _, once = base(name)
    first = kvjax.generate(tiny_params(), read(any_example(name)), max_new_tokens=N // 2, eos_token_ids=())
    head = np.asarray(first.tokens)
    second = kvjax.generate(tiny_params(), first.cache, max_new_tokens=N // 2, eos_token_ids=())
    np.testing.assert_array_equal(np.concatenate([head, second.tokens], axis=1), once.tokens)
    np.testing.assert_allclose(second.cache.logits, once.cache.logits, atol=1e-5)


@pytest.mark.parametrize("name", law([group(name) for name in ("full", "snapkv", "h2o", "quest", "per_layer")]))
def test_chunked_prompt_equals_one_pass(name):
    logits, once = base(name)
    cache = read(any_example(name), chunk_size=16)
    np.testing.assert_allclose(cache.logits, logits, atol=1e-4)
    got = go_on(cache)
    np.testing.assert_array_equal(got.tokens, once.tokens)


@pytest.mark.parametrize("name", law(ALL))
def test_second_call_does_not_retrace(name):
    """Neither other tokens nor another value of a traced knob compiles again."""
    base(name)
    traces = len(TRACES)
    method = any_example(name)
    if name in NAMES and "budget" in oracle(name).KNOBS:
        method = example(name, capacity=oracle(name).KNOBS["budget"], budget=oracle(name).KNOBS["budget"] - 1)
    cache = read(method, [row[::-1] for row in prompts()])
    out = kvjax.generate(tiny_params(), cache, method=method, max_new_tokens=N, eos_token_ids=())
    go_on(kvjax.fork(out.cache))
    assert len(TRACES) == traces


@pytest.mark.parametrize("name", law(ALL))
def test_decoding_keeps_structure_shapes_and_dtypes(name):
    cache = jax.eval_shape(lambda: read(any_example(name)))
    tokens, active = jnp.zeros((3, 1), jnp.int32), jnp.ones((3, 1), bool)
    after = jax.eval_shape(lambda cache: run_step(tiny_params(), cache, tokens, active), cache)
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    assert [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(after)] == [
        (x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(cache)
    ]
    leaves = jax.tree.leaves((cache.layers, cache.shared, cache.length, cache.logits))
    assert all(x.shape[0] == 3 for x in leaves), "axis B comes first in every leaf"


@pytest.mark.parametrize("name", law(ALL))
def test_bfloat16_is_kept_under_strict_promotion(name):
    """Keys and values stay in the dtype of the model; scores and logits are float32."""
    tokens, lengths = padded(prompts())
    config = dataclasses.replace(TINY, dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny_params())

    def run():
        cache = kvjax.prefill(
            params, tokens, lengths=lengths, config=config, method=any_example(name), max_new_tokens=8
        )
        return kvjax.generate(params, cache, max_new_tokens=2, eos_token_ids=()).cache

    cache = jax.eval_shape(run)
    assert cache.logits.dtype == jnp.float32
    for layer in cache.layers:
        assert stored(layer).key.dtype == stored(layer).value.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", law(ALL))
def test_resident_bytes_are_the_arrays(name):
    _, got = base(name)
    assert got.stats.resident_bytes == sum(x.nbytes for x in jax.tree.leaves((got.cache.layers, got.cache.shared)))
    np.testing.assert_array_equal(got.stats.full_bytes_read, got.stats.length * 2 * 8 * 4 * 2 * 2)
    np.testing.assert_array_equal(got.stats.length, np.array([len(row) for row in prompts()]) + N)


@pytest.mark.parametrize("name", law([group(name) for name in ("snapkv", "h2o", "keydiff", "streamingllm", "stages")]))
def test_storage_shrinks_physically(name):
    assert base(name)[1].stats.resident_bytes < 0.8 * base("full")[1].stats.resident_bytes


@pytest.mark.parametrize("name", law([group(name) for name in ("full", "streamingllm", "h2o", "snapkv")]))
def test_extend_equals_feeding_tokens(name):
    """Where a decode step attends to every kept token, several tokens at once equal the same tokens step by step."""
    rng = np.random.default_rng(0)
    question = rng.integers(0, 60, (3, 7)).astype(np.int32)
    at_once = kvjax.extend(tiny_params(), read(any_example(name)), question)
    fed = read(any_example(name))
    for column in question.T:
        fed = kvjax.decode_step(tiny_params(), fed, column)
    np.testing.assert_allclose(fed.logits, at_once.logits, atol=1e-4)
    np.testing.assert_array_equal(fed.length, at_once.length)
    for one, two in zip(fed.layers, at_once.layers, strict=True):
        for head in np.ndindex(3, 2):
            ours, theirs = (np.asarray(stored(x).position[head]) for x in (one, two))
            assert set(ours.tolist()) - {-1} == set(theirs.tolist()) - {-1}


@pytest.mark.parametrize("name", [group("full"), group("streamingllm")])
def test_extend_equals_a_longer_prompt(name):
    """It does for methods that treat a prompt and its continuation alike."""
    head, tail = padded([row[:-5] for row in prompts()]), padded([row[-5:] for row in prompts()], 5)
    cache = kvjax.prefill(
        tiny_params(),
        head[0],
        lengths=head[1],
        config=TINY,
        method=any_example(name),
        max_new_tokens=24,
        pad_multiple=1,
    )
    cache = kvjax.extend(tiny_params(), cache, tail[0], lengths=tail[1])
    np.testing.assert_allclose(cache.logits, base(name)[0], atol=1e-4)


@pytest.mark.parametrize("name", law(METHODS))
def test_ragged_questions_equal_alone(name):
    """Rows extended together by 4, 1 and 0 tokens go on as they would alone."""
    together = ask(read(any_example(name)))
    logits = np.asarray(together.logits)
    np.testing.assert_array_equal(together.length, [44, 24, 9])
    np.testing.assert_array_equal(logits[2], base(name)[0][2])
    for row in (0, 1):
        tokens, lengths = padded([QUESTIONS[row]], 1 if name == "quest" and row else 4)
        cache = kvjax.extend(tiny_params(), read(any_example(name), [prompts()[row]]), tokens, lengths=lengths)
        np.testing.assert_allclose(cache.logits[0], logits[row], atol=1e-4)


@pytest.mark.parametrize("name", [group("quest"), group("h2o")])
def test_prefill_inside_user_jit(name):
    """The public calls compose with `jax.jit`; nothing is checked or read there."""
    tokens, lengths = padded(prompts())

    @jax.jit
    def first_token(tokens, lengths, method):
        cache = kvjax.prefill(
            tiny_params(), tokens, lengths=lengths, config=TINY, method=method, max_new_tokens=24, pad_multiple=1
        )
        return kvjax.generate(tiny_params(), cache, max_new_tokens=2, eos_token_ids=()).tokens

    got = first_token(tokens, lengths, any_example(name))
    np.testing.assert_array_equal(got, base(name)[1].tokens[:, :2])


def test_frequencies_cover_a_turn():
    """The drives rotate: their slowest pair is not the identity over the lengths used here."""
    assert frequencies(16)[-1] * 50 > 0.5
