"""`sentence_cut` and `sentence_add` against loops in NumPy, on every implementation; interpreted where there is no GPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import sentence_add as add_package
from pallas_kernels import sentence_cut as cut_package
from pallas_kernels.sentence_add import sentence_add
from pallas_kernels.sentence_cut import CLOSES, JOINS, Rules, sentence_cut

ON_GPU = jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason=f"needs a GPU, got {jax.default_backend()}")
CUT = {
    "xla": functools.partial(sentence_cut, implementation="xla"),
    "interpreted": lambda *args, rules: cut_package.pallas_triton.sentence_cut(
        *args[:-1], jnp.asarray(args[-1], jnp.int32), rules=rules, interpret=True
    ),
    "pallas_triton": functools.partial(sentence_cut, implementation="pallas_triton"),
}
ADD = {
    "xla": functools.partial(sentence_add, implementation="xla"),
    "interpreted": functools.partial(add_package.pallas_triton.sentence_add, interpret=True),
    "pallas_triton": functools.partial(sentence_add, implementation="pallas_triton"),
}
NAMES = ["xla", "interpreted", pytest.param("pallas_triton", marks=NEEDS_GPU)]
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


def check_cut(name, arrays, cursor, lengths, events, budget, rules):
    """Compare one call with the oracle."""
    length = jnp.broadcast_to(jnp.asarray(lengths, jnp.int32)[:, None], arrays[3].shape)
    args = (*arrays, length, cursor, jnp.asarray(events, jnp.int32))
    slots, listed = jax.jit(functools.partial(CUT[name], rules=rules))(*args, budget)
    assert slots.dtype == jnp.int32 and listed.dtype == bool and slots.shape == listed.shape == arrays[1].shape
    for at, want in enumerate(cut_oracle(*(np.asarray(x) for x in args), budget, rules)):
        row, head = divmod(at, arrays[3].shape[1])
        assert listed[row, head].sum() == len(want) and listed[row, head, : len(want)].all()
        np.testing.assert_array_equal(slots[row, head], want + [0] * (slots.shape[2] - len(want)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rules", [PAPER, CODE], ids=["paper", "code"])
@pytest.mark.parametrize("budget", [8, 12, 30, 66, 300])
def test_sentence_cut(name, ties, rules, budget):
    """Open sentences of 1, 8 and 21 tokens, the last of which closes in one of two calls."""
    arrays, cursor = sentences(budget, ties=ties)
    check_cut(name, arrays, cursor, (0, 7, 20), (JOINS, JOINS, JOINS), budget, rules)
    check_cut(name, arrays, cursor, (5, 1, 20), (JOINS, 0, CLOSES), budget, rules)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [25, 50, 65])
def test_sentences_of_no_number_rank_last(name, budget):
    """NaN and -inf among finished sentences: taken where nothing better is left, the lower slots first."""
    arrays, cursor = sentences(3)
    arrays[0] = arrays[0].at[:, :, 0].set(-jnp.inf).at[:, :, 4].set(jnp.nan)
    check_cut(name, arrays, cursor, (3, 3, 3), (JOINS,) * 3, budget, PAPER)


@pytest.mark.parametrize("name", NAMES)
def test_cut_under_vmap(name):
    """Of everything, the budget too."""
    sets = [sentences(seed, rows=1) for seed in (1, 2)]
    event, length = jnp.full((1,), JOINS, jnp.int32), jnp.full((1, 2), 2, jnp.int32)
    args = [(*arrays, length, cursor, event, jnp.int32(budget)) for (arrays, cursor), budget in zip(sets, (16, 31))]
    run = functools.partial(CUT[name], rules=PAPER)
    together = jax.vmap(run)(*(jnp.stack(x) for x in zip(*args)))
    for at, one in enumerate(args):
        for alone, both in zip(run(*one), together):
            np.testing.assert_array_equal(alone, both[at])


def book(seed, rows=3, heads=2, group=2, dim=16, slots=20, dtype="float32"):
    """Arguments of `sentence_add`; row 0 goes on, row 1 ends a sentence, row 2 stands still, and empty slots hold NaN."""
    rng = np.random.default_rng(seed)
    cursor = np.array([8, 12, 6], np.int32)[:rows]
    held = (np.arange(slots) < cursor[:, None])[:, None, :, None]
    key = np.where(held, rng.normal(size=(rows, heads, slots, dim)), np.nan)
    mean = rng.normal(size=(rows, heads, slots, dim))
    count = rng.integers(2, 5, (rows, heads)).astype(np.int32)
    sentence = rng.integers(-1, 5, (rows, heads, slots)).astype(np.int32)
    query, query_sum = rng.normal(size=(2, rows, heads, group, dim)).astype(np.float32)
    key_sum = rng.normal(size=(rows, heads, dim)).astype(np.float32)
    key, mean, query = (jnp.asarray(x, dtype) for x in (key, mean, query))
    length = jnp.broadcast_to(jnp.array([3, 0, 2], jnp.int32)[:rows, None], (rows, heads))
    state = (*(jnp.asarray(x) for x in (sentence, mean, count, query_sum, key_sum)), length)
    return key, query, jnp.asarray(cursor), jnp.array([JOINS, CLOSES, 0], jnp.int32)[:rows], state


def add_oracle(key, query, cursor, event, state):
    key, query = (np.asarray(x.astype(jnp.float32)) for x in (key, query))
    sentence, mean, count, query_sum, key_sum, length = (np.array(x) for x in state)
    mean = mean.astype(np.float32)
    for row, head in np.ndindex(count.shape):
        if event[row] == 0:
            continue
        sentence[row, head, cursor[row] - 1] = count[row, head]
        query_sum[row, head] += query[row, head]
        key_sum[row, head] += key[row, head, cursor[row] - 1]
        length[row, head] += 1
        if event[row] == CLOSES:
            mean[row, head, count[row, head]] = key_sum[row, head] / length[row, head]
            count[row, head] += 1
            query_sum[row, head], key_sum[row, head], length[row, head] = 0, 0, 0
    return sentence, mean, count, query_sum, key_sum, length


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sentence_add(name, dtype):
    args = book(0, dtype=dtype)
    got, want = jax.jit(ADD[name])(*args), add_oracle(*args)
    for new, right, old in zip(got, want, args[-1]):
        assert (new.shape, new.dtype) == (old.shape, old.dtype)
        tolerance = 1e-2 if new.dtype == jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(np.asarray(new.astype(jnp.float32)), right, rtol=tolerance, atol=tolerance)
    for new, old in zip(got, args[-1]):
        np.testing.assert_array_equal(np.asarray(new[2]), np.asarray(old[2]))  # stands still


@pytest.mark.parametrize("name", NAMES)
def test_sentence_add_past_the_end_writes_nowhere(name):
    key, query, cursor, event, state = book(1)
    sentence, mean, count, *sums = state
    got = ADD[name](key, query, cursor + 20, event, (sentence, mean, count + 20, *sums))
    np.testing.assert_array_equal(got[0], sentence)
    np.testing.assert_array_equal(got[1], mean)


@pytest.mark.parametrize("name", NAMES)
def test_add_under_vmap(name):
    sets = [book(seed) for seed in (1, 2)]
    together = jax.vmap(ADD[name])(*jax.tree.map(lambda *x: jnp.stack(x), *sets))
    for at, one in enumerate(sets):
        for alone, both in zip(ADD[name](*one), together):
            np.testing.assert_allclose(alone, both[at], rtol=1e-6)


def test_refusals():
    (score, sentence, position, count), cursor = sentences(0)
    rest = count, cursor, cursor, 12
    with pytest.raises(ValueError, match="sentence_cut: got score, sentence, position"):
        sentence_cut(score, sentence, position, count[:1], *rest, rules=PAPER)
    with pytest.raises(ValueError, match="expected a float32 score and int32"):
        sentence_cut(score.astype(jnp.bfloat16), sentence, position, count, *rest, rules=PAPER)
    long = jnp.zeros((3, 2, 20000), jnp.int32)
    with pytest.raises(NotImplementedError, match="got 20000 slots, expected 1 to 16384"):
        sentence_cut(score, long, long, count, *rest, rules=PAPER, implementation="pallas_triton", platform="gpu")
    key, query, cursor, event, state = book(0)
    with pytest.raises(ValueError, match="sentence_add: got key"):
        sentence_add(key, query[..., :8], cursor, event, state)
    with pytest.raises(ValueError, match="expected int32 numbers and float32 sums"):
        sentence_add(key, query, cursor, event > 0, state)
    wide = [x[:, :, :1].repeat(3, axis=2) for x in (query, state[3])]
    with pytest.raises(NotImplementedError, match="got 3 query heads per KV head and head_dim 16"):
        changed = (*state[:3], wide[1], *state[4:])
        sentence_add(key, wide[0], cursor, event, changed, implementation="pallas_triton", platform="gpu")
