"""`sentence_cut` against loops in NumPy, on every implementation; interpreted where there is no GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.choose.sentencekv.sentence_cut import CLOSES, JOINS, Rules, sentence_cut
from tests.pallas_kernels.cases import HOPPER, MOSAIC, compiled, every_body, implementations, on_hopper, thorough

CUT = implementations("sentence_cut") | on_hopper(sentence_cut)
PAPER, CODE = Rules(sinks=3, recent=4, open_cap=9, whole=0), Rules(sinks=3, recent=4, open_cap=0, whole=1)


def sentences(seed, rows=3, heads=2, slots=70, room=12, ties=False):
    """Scores and numbers of sentences of 1 to 7 slots; behind them an open sentence and empty slots."""
    rng = np.random.default_rng(seed)
    sentence = np.cumsum(rng.random((rows, heads, slots)) < 0.25, axis=2).astype(np.int32)
    sentence -= sentence[..., :1]
    used = rng.integers(slots - room, slots, (rows, 1, 1))
    sentence = np.where(np.arange(slots) < used, sentence, -1)
    position = np.where(sentence >= 0, 5 * np.arange(slots), -1).astype(np.int32)
    sentence[..., -room:] = np.where(position[..., -room:] >= 0, sentence[..., :-room].max(-1, keepdims=True), -1)
    count = sentence.max(axis=2)
    score = rng.integers(-2, 3, (rows, heads, slots)) * 0.5 if ties else rng.normal(size=(rows, heads, slots))
    score = np.where(rng.random(score.shape) < 0.1, -score * 0.0, score)
    score = np.where(np.arange(slots) < count[..., None], score, np.nan)
    arrays = score.astype(np.float32), sentence, position, count.astype(np.int32)
    return [jnp.asarray(x) for x in arrays], jnp.asarray((position >= 0).sum(axis=2)[:, 0], jnp.int32)


def cut_oracle(score, sentence, position, count, length, cursor, event, budget, rules):
    """Sentences from the best on, the tokens of each from its first on; one list per row and head."""
    chosen = []
    for row, head in np.ndindex(count.shape):
        held = [slot for slot in range(sentence.shape[2]) if position[row, head, slot] >= 0]
        written = 0 if event[row] == CLOSES else length[row, head] + 1
        recent = min(max(rules.recent, min(written, rules.open_cap)), budget - rules.sinks)
        high = 0 if written <= rules.whole else cursor[row] - recent
        taken = {slot for slot in held if slot < rules.sinks or slot >= high}
        worth = np.nan_to_num(score[row, head].astype(np.float64), nan=-1e300, neginf=-1e300)
        left = budget - rules.sinks - recent
        for number in sorted(range(count[row, head]), key=lambda s: (-worth[s], s)):
            for slot in held:
                if sentence[row, head, slot] == number and rules.sinks <= slot < high and left > 0:
                    taken.add(slot)
                    left -= 1
        chosen.append(sorted(taken))
    return chosen


def check_cut(name, arrays, cursor, lengths, events, budget, rules, scored=True):
    """Compare one call with the oracle; not ``scored``: the scores are products of a query and a vector of each sentence."""
    length = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32)[:, None], arrays[3].shape)
    args = (*arrays, length, cursor, jnp.asarray(events, jnp.int32))
    one = jnp.zeros((*arrays[3].shape, 2, 16)).at[..., 1, 3].set(0.5)  # half of a query, of which one channel is not 0
    vector = jnp.zeros((*arrays[0].shape, 16)).at[..., 3].set(arrays[0])
    vectors = {} if scored else {"query": one, "vector": vector, "added": one}
    slots, listed = compiled(CUT[name], rules=rules)(args[0] if scored else None, *args[1:], budget, **vectors)
    assert slots.dtype == jnp.int32 and listed.dtype == bool and slots.shape == listed.shape == arrays[1].shape
    for at, want in enumerate(cut_oracle(*(np.asarray(x) for x in args), budget, rules)):
        row, head = divmod(at, arrays[3].shape[1])
        assert listed[row, head].sum() == len(want) and listed[row, head, : len(want)].all()
        np.testing.assert_array_equal(slots[row, head], want + [0] * (slots.shape[2] - len(want)))


@every_body
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rules", [PAPER, CODE], ids=["paper", "code"])
@pytest.mark.parametrize("budget", [8, 12, 30, 66, 300])
def test_lists_equal_loops(name, ties, rules, budget):
    """Open sentences of 1, 8 and 21 tokens, the last of which closes in one of two calls."""
    arrays, cursor = sentences(budget, ties=ties)
    check_cut(name, arrays, cursor, (0, 7, 20), (JOINS, JOINS, JOINS), budget, rules)
    check_cut(name, arrays, cursor, (5, 1, 20), (JOINS, 0, CLOSES), budget, rules, scored=False)


@every_body
@pytest.mark.parametrize("budget", [25, 50, 65])
def test_sentences_of_no_number_rank_last(name, budget):
    """NaN and -inf among finished sentences: taken where nothing better is left, the lower slots first."""
    arrays, cursor = sentences(3)
    arrays[0] = arrays[0].at[:, :, 0].set(-jnp.inf).at[:, :, 4].set(jnp.nan)
    check_cut(name, arrays, cursor, (3, 3, 3), (JOINS,) * 3, budget, PAPER)


@pytest.mark.parametrize("name", [pytest.param(MOSAIC, marks=[] if HOPPER else thorough)])
def test_more_slots_than_a_program_holds(name):
    arrays, cursor = sentences(5, rows=1, slots=9000)
    args = (*arrays, jnp.full((1, 2), 3, jnp.int32), cursor, jnp.full((1,), JOINS, jnp.int32), 4000)
    got, want = (compiled(CUT[x], rules=PAPER)(*args) for x in (name, "xla"))
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
