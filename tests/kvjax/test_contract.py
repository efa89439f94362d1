"""The laws of `kvjax.testing.laws`, run over everything `kvjax.methods` exports and over examples of the wrappers.

What is written out here is a law of some methods only.
A new method needs nothing here: its oracle declares the small setting it is tested at (see ``harness.example``).
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.decoding import decode
from kvjax.protocol.families import Retrieval
from kvjax.testing import laws
from kvjax.testing.subject import LAYER_STEPS as STEPS
from kvjax.testing.subject import LENGTHS, tokens_of_layer
from tests.harness import (
    ALL,
    METHODS,
    MOST_UNLIKE,
    NAMES,
    ONE_LAYER,
    WRAPPERS,
    any_example,
    drive,
    example,
    group,
    law,
    oracle,
    read,
    repeated,
    stored,
    tiny_params,
    whole,
)
from tests.kvjax.cases import base, go_on, model, subject

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOTTED = [x for x in ALL if x in ONE_LAYER or (x not in METHODS and any_example(x.values[0]).slotted)]
# A choice for speed.
# Quest and the examples of wrappers around it: a choice, because their tests know Quest's budget and index.
SELECTING = [group(name) for name in ("quest", "stages", "dense_below", "twilight")]


def has_other_bytes(method):
    """Whether rows have another size, or more is read than rows and what `count` says: its own tests count it.

    Packed rows are smaller. Methods that choose rows but cannot be wrapped read estimates, codes or representatives too.
    """
    return method.packs if method.composable else method.offloaded(True) is not None


def plain(name):
    """One layer of the example without any change."""
    return subject(name).plain


def one_layer(method):
    """One layer of another method on the same tokens."""
    return subject("full").drive(method=method)


def test_every_method_has_an_oracle_and_an_example():
    for name in NAMES:
        module = oracle(name)
        assert isinstance(module.KNOBS, dict) and module.LENGTHS and callable(module.run), name
        assert isinstance(example(name), kvjax.methods.__dict__[type(example(name)).__name__])
        assert name == "oracle" or type(example(name)).PAPER.startswith("arXiv:")


# ---- one layer ----------------------------------------------------------------------------------------------------


# Each law of `kvjax.testing.laws` and the examples that it is shown by; what `law` and `repeated` leave out runs thoroughly.
LAWS = {
    laws.empty_slots_are_never_read: law(SLOTTED),
    laws.scores_are_numbers: repeated(SLOTTED, but=()),  # test_plugins.py runs it by default
    laws.rows_are_independent: law(SLOTTED),
    laws.permuting_heads_permutes_the_output: law(SLOTTED),
    laws.equal_query_heads_attend_as_one: law(SLOTTED),
    laws.prompt_chunks_do_not_change_results: repeated(SLOTTED, but=("tova",)),  # test_offload.py reads others in chunks
    laws.outputs_are_attention_over_the_chosen: law(SLOTTED),
    laws.everything_kept_equals_full: whole(ALL, but=MOST_UNLIKE),
    laws.setting_does_something: whole([x for x in ALL if x.values[0] not in ("full", "verified")]),  # they answer as Full
    laws.ragged_rows_equal_alone: whole(ALL),
    laws.generating_in_two_calls_equals_one: whole(METHODS),
    laws.second_call_does_not_retrace: whole(ALL),
    laws.decoding_keeps_structure_shapes_and_dtypes: law(ALL),
    laws.bfloat16_is_kept: law(ALL),
    laws.resident_bytes_are_the_arrays: whole(ALL),
    laws.ragged_questions_equal_alone: whole(METHODS, but=MOST_UNLIKE),
}
OPTIONS = {
    # A basis of fewer different tokens than channels is not unique, so MosaicKV's shortest row may pack new tokens otherwise.
    (laws.ragged_rows_equal_alone, "mosaickv"): {"rows": 2},
    (laws.ragged_questions_equal_alone, "quest"): {"widths": (4, 1)},
}


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        pytest.param(rule, *x.values, marks=x.marks, id=f"{rule.__name__}-{x.values[0]}")
        for rule, examples in LAWS.items()
        for x in examples
    ],
)
def test_laws(rule, name):
    rule(subject(name), **OPTIONS.get((rule, name), {}))


def test_every_law_is_shown():
    written = {x for x in vars(laws).values() if inspect.isfunction(x) and x.__module__ == laws.__name__ and x.__doc__}
    elsewhere = {laws.same, laws.seen_at_the_end, laws.cost_counts_what_is_attended}
    assert written == {*LAWS, *elsewhere}


@pytest.mark.parametrize(
    "name", repeated([group(x) for x in ("full", "snapkv", "h2o", "streamingllm", "tokenselect")], but=("full",))
)
@pytest.mark.slow  # operation by operation, each of them is a program
def test_jit_equals_eager(name):
    q, k, v = tokens_of_layer()
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
    budget = {"quest": 12, "stages": 8, "dense_below": 20, "twilight": 12}[name]
    for step, row, head in np.ndindex(STEPS, len(LENGTHS), 2):
        chosen = got.chosen[step, row, head][got.chosen[step, row, head] >= 0]
        assert len(set(chosen.tolist())) == len(chosen)
        assert len(chosen) == got.attended[step, row, head].sum() <= budget
        assert not (got.attended[step, row, head] & ~got.kept[step, row, head]).any()
        if name == "quest":  # full pages but for the newest
            seen = LENGTHS[row] + step + 1
            assert len(chosen) == min(seen, 8 + (seen - 1) % 4 + 1)


@pytest.mark.parametrize("name", law(SELECTING))
def test_index_updated_equals_index_rebuilt(name):
    method, state = any_example(name), plain(name).state
    inner, aux = {
        "quest": lambda: (method, state.aux),
        "dense_below": lambda: (method.method, state.aux),
        "stages": lambda: (method.retrieve, state.aux[1]),
        "twilight": lambda: (method.method, state.aux.inner),
    }[name]()
    assert isinstance(inner, Retrieval)
    jax.tree.map(np.testing.assert_array_equal, aux, inner.index(state.cache.resident()))


@pytest.mark.slow
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
    under_test = subject(name)
    cost, seen = under_test.layer.cost(under_test.plain.state, None), laws.seen_at_the_end(under_test)
    if name == "stages":  # an upper bound where an eviction left holes in pages
        assert (np.asarray(cost.attended) >= seen.mean(axis=1)).all()
        return
    laws.cost_counts_what_is_attended(under_test)
    if not has_other_bytes(any_example(name)):
        np.testing.assert_allclose(cost.kv_bytes, seen.sum(axis=1) * 2 * 16 * 4)
    metadata = {
        "quest": 2 * np.ceil((LENGTHS + STEPS) / 4) * 2 * 16 * 4,  # two bounds of every page in use
        "keydiff": np.full(len(LENGTHS), 2 * 2 * 16 * 4),  # two numbers for each of a sum
        "h2o": seen.sum(axis=1) * 4,  # one accumulated probability per stored token
    }
    if name in metadata:
        np.testing.assert_array_equal(cost.metadata_bytes, metadata[name])


# ---- the whole model ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", repeated([x for x in ALL if x.values[0] != "knorm"], but=("quest",)))
def test_a_row_in_a_batch_of_one_is_as_in_a_ragged_batch(name):
    """By default, a row alone is there three times.

    Under Knorm, rounding decides which keys of `TINY` are the shortest: they are normalised, without weights.
    """
    alone = subject(name, copies=1)
    laws.ragged_rows_equal_alone(alone, rows=2 if name == "mosaickv" else None)
    laws.ragged_questions_equal_alone(alone)


@pytest.mark.parametrize("name", law([group(name) for name in ("full", "snapkv", "h2o", "quest", "per_layer")]))
def test_chunked_prompt_equals_one_pass(name):
    logits, once = base(name)
    cache = read(any_example(name), chunk_size=16, config=model(name))
    np.testing.assert_allclose(cache.logits, logits, atol=1e-4)
    got = go_on(cache)
    np.testing.assert_array_equal(got.tokens, once.tokens)


@pytest.mark.parametrize("name", whole(ALL))
def test_no_state_holds_nan(name):
    """`jax_debug_nans` stops at a program that returns NaN, also in a slot or a page that holds nothing."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(base(name)[1]):
        assert not np.issubdtype(leaf.dtype, np.inexact) or not np.isnan(leaf).any(), jax.tree_util.keystr(path)


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


@pytest.mark.parametrize("name", repeated(METHODS, but=("quest",)))
def test_a_long_extend_in_passes_equals_one_pass(name, monkeypatch):
    """Ragged rows, of which one gets nothing; the passes are 8 tokens of each of three rows."""
    tokens, count = np.random.default_rng(0).integers(0, 60, (3, 20)).astype(np.int32), jnp.asarray([20, 13, 0])
    found = []
    for most in (8192, 24):
        monkeypatch.setattr(decode, "_PASS", most)
        found.append(jax.jit(lambda *args: decode.run_extend(*args))(tiny_params(), base(name)[1].cache, tokens, count))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
