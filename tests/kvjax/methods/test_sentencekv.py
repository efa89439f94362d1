"""SentenceKV beyond the laws and the generic comparison: odd sentences, long decoding, boundary tables."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.methods import Full
from kvjax.methods.sentencekv.method import RELEASED, SentenceKV
from kvjax.protocol.typing import EMPTY
from kvjax.wrappers import PerLayer
from tests.harness import TINY, oracle, random_tokens, read, small, stored
from tests.kvjax.cases import STEPS, against_oracle, feed_layer, prefill_layer

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("sentencekv")]
KNOBS = oracle("sentencekv").KNOBS  # budget 12 with 2 first and 3 last slots, a pool of 24, a window of 4


def table(ends):
    """Boundary table in which the given ids end a sentence."""
    out = np.zeros(512, bool)
    out[list(ends)] = True
    return out


def check(lengths, steps=STEPS, seed=0, fields=None, **knobs):
    """Random rows against the oracle; ``fields`` are knobs only the method has. Returns the `harness.Drive`."""
    data = random_tokens(seed, len(lengths), 2, 2, max(lengths) + steps, 16)
    return against_oracle("sentencekv", data, lengths, fields=fields, **knobs)[0]


def positions(mask):
    return np.flatnonzero(mask).tolist()


# ---- against the oracle -------------------------------------------------------------------------------------------


def test_sentence_longer_than_the_budget():
    """It takes all there is to take, from its start; the rest of it is left out."""
    got = check((40,), boundary=table([29]))
    for step, head in itertools.product(range(1, 10), range(2)):
        kept, attended = positions(got.kept[step, 0, head]), positions(got.attended[step, 0, head])
        recent = min(max(3, step + 1), 10)
        assert len(attended) == 12 and attended[:2] == kept[:2] and attended[-recent:] == kept[-recent:]
        for sentence in (range(30), range(30, 40)):
            taken = [i for i in attended[2:-recent] if i in sentence]
            assert taken == [i for i in kept[2:-recent] if i in sentence][: len(taken)]


def test_sentences_of_one_token():
    """Of the prompt only, and of everything: each step then ends a sentence and attends to the whole pool."""
    check((40, 17), boundary=table(range(40)))
    got = check((40, 17), boundary=np.ones(512, bool))
    np.testing.assert_array_equal(got.attended, got.kept)


def test_without_a_boundary_the_prompt_is_one_sentence():
    """The prompt is one sentence, of which the first tokens by position are taken; what follows never closes."""
    got = check((40, 5), boundary=table([]))
    for step, head in itertools.product(range(1, 10), range(2)):
        kept, attended = positions(got.kept[step, 0, head]), positions(got.attended[step, 0, head])
        recent = min(max(3, step + 1), 10)
        assert attended == kept[: 12 - recent] + kept[-recent:]


def test_the_default_and_the_released_reading_of_the_pool():
    default, released = SentenceKV(), SentenceKV(**RELEASED)
    assert (default.prefilter, default.kernel) == ("global", 31)
    assert (released.prefilter, released.kernel, released.budget) == ("kv_head", 7, default.budget)


def test_prompt_that_ends_with_a_sentence():
    """No empty tail sentence; and a sentence of generated tokens closes like one of the prompt."""
    check((12, 20, 24), boundary=table([3, 11, 17, 19, 23, 25, 29, 33]))


def test_the_pool_is_the_factor_times_the_budget():
    """A traced budget below its capacity keeps what it would keep alone."""
    got = check((24, 40), fields={"capacity": 12}, budget=10)
    assert got.kept[0, 1].sum(axis=-1).tolist() == [21, 21]  # with the step's


# ---- bookkeeping --------------------------------------------------------------------------------------------------


def same_state(one, two, atol=1e-5):
    """Assert that two states agree, keys and values where something is stored."""
    ours, theirs = stored(one), stored(two)
    np.testing.assert_array_equal(ours.position, theirs.position)
    np.testing.assert_array_equal(ours.cursor, theirs.cursor)
    valid = np.asarray(ours.valid)
    np.testing.assert_allclose(ours.key[valid], theirs.key[valid], atol=atol)
    np.testing.assert_allclose(ours.value[valid], theirs.value[valid], atol=atol)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol), one.aux, two.aux)


@pytest.mark.parametrize("prefilter", ["kv_head", "global"])
@pytest.mark.thorough
def test_tokens_at_once_leave_the_state_of_tokens_one_by_one(prefilter):
    """`extend` closes sentences inside the question, and several of them; rows may bring fewer tokens."""
    data = tuple(jnp.asarray(x) for x in random_tokens(3, 2, 2, 2, 60, 16))
    lengths = jnp.array([30, 22], jnp.int32)
    ends = table([5, 9, 17, 24, 28, 31, 32, 35, 41])
    method = small(SentenceKV, **{**KNOBS, "boundary": ends, "prefilter": prefilter})
    state = prefill_layer(method, data, lengths, prompt=30, room=30)
    at = lengths[:, None] + jnp.arange(9, dtype=jnp.int32)[None]
    at = at.at[1, 7:].set(EMPTY)
    _, together = feed_layer(method, state, data, at)
    apart = state
    for column in range(9):
        _, apart = feed_layer(method, apart, data, at[:, column : column + 1])
    same_state(apart, together)
    # and the next steps agree
    for step in range(4):
        at = lengths[:, None] + jnp.array([[9 + step], [7 + step]], jnp.int32)
        one, apart = feed_layer(method, apart, data, at)
        two, together = feed_layer(method, together, data, at)
        np.testing.assert_allclose(one, two, atol=1e-5)


def test_ids_decide_and_not_positions():
    """Under other ids the same tokens end sentences, of the prompt and behind it."""
    data, ids, ends = random_tokens(3, 2, 2, 2, 60, 16), np.random.default_rng(1).permutation(512), table([5, 9, 24, 31, 35])
    states = []
    for names in (np.arange(512), ids):
        method = small(SentenceKV, **{**KNOBS, "boundary": ends[np.argsort(names)]})
        state = prefill_layer(method, data, np.array([30, 22]), names, prompt=30, room=30)
        states.append(feed_layer(method, state, data, np.array([[30], [22]]) + np.arange(9), names)[1])
    same_state(*states)


@pytest.mark.parametrize("prefilter", ["kv_head", pytest.param("global", marks=pytest.mark.thorough)])
def test_every_step_of_a_long_generation_is_the_oracles(prefilter):
    """Mean keys, where sentences begin, and the sums over the open one decide what is attended."""
    ends = np.random.default_rng(4).random(512) < 0.08
    check((40, 25), steps=200, seed=6, boundary=ends, prefilter=prefilter)


# ---- refusals -----------------------------------------------------------------------------------------------------


def test_a_table_that_is_none():
    """Without a table the refusal says how to make one, at the prompt, where the tokens are first cut into sentences."""
    for wrong, told in ((np.zeros(61, np.int32), "boundary"), (np.zeros((61, 1), bool), "boundary"), (None, "tokenizer=")):
        with pytest.raises(ValueError, match=told):
            read(small(SentenceKV, **{**KNOBS, "boundary": wrong}))


def test_sizes_need_no_table():
    """By name, as a method, and inside of a wrapper; the table's values change no size."""
    sizes = {"config": TINY, "batch": 2, "prompt_slots": 64, "max_new_tokens": 8}
    knobs = {**KNOBS, "boundary": None}
    want = kvjax.memory_needed(small(SentenceKV, **{**knobs, "boundary": np.ones(TINY.vocab_size, bool)}), **sizes)
    assert kvjax.memory_needed(small(SentenceKV, **knobs), **sizes) == want
    assert kvjax.memory_needed(PerLayer(layers={0: small(SentenceKV, **knobs)}, default=Full()), **sizes).device > want.after
    assert kvjax.memory_needed("sentencekv", **sizes).device > 0
