"""`Twilight`: what top-p over estimates by 4-bit keys leaves of a selection, beside float64 loops; what is refused."""

import dataclasses

import numpy as np
import pytest

from kvjax.methods import SOCKET, Full, ParisKV, Quest, RetrievalAttention, SnapKV
from kvjax.testing.layer import frequencies
from kvjax.wrappers import DenseBelow, Stages, Twilight
from tests.harness import WRAPPERS, example
from tests.kvjax.cases import subject
from tests.oracles import quest
from tests.oracles.plain import attend_to, rotate_all, softmax

pytestmark = pytest.mark.usefixtures("quick_compile")


def coded(key):
    """A key [D] in 4 bits: the codes, the smallest channel and the step between two codes."""
    low, step = key.min(), (key.max() - key.min()) / 15
    return [min(max(round((x - low) / step), 0), 15) for x in key], low, step


def pruned(query, keys, positions, mass):
    """Of ``positions`` the fewest with ``mass`` of the softmax of [D] query by keys in 4 bits."""
    positions, logits = sorted(positions), []
    for i in positions:
        codes, low, step = coded(keys[i])
        logits.append(sum(x * (low + step * code) for x, code in zip(query, codes, strict=True)) / np.sqrt(len(query)))
    share = dict(zip(positions, softmax(logits), strict=True))
    kept, so_far = set(), 0.0
    for i in sorted(positions, key=lambda i: -share[i]):
        if so_far >= mass:
            break
        kept.add(i)
        so_far += share[i]
    return kept


def compare(got, rows, lengths, mass, candidates):
    """Assert that a drive attends to what the loops keep of the candidates; returns how many tokens they leave out."""
    left_out, inv_freq = 0, frequencies(rows[0].shape[-1])
    for row, length in enumerate(lengths):
        end = length + len(got.outputs)
        q, k = (rotate_all(x[row][..., :end, :], inv_freq) for x in rows[:2])
        v = np.asarray(rows[2][row], np.float64)
        for step, t in enumerate(range(length, end)):
            chosen = []
            for h in range(k.shape[0]):
                selected = candidates(q, k, h, t, length)
                needed = [pruned(q[h, g, t], k[h], selected, mass) for g in range(q.shape[1])]
                chosen.append(set().union(*needed) | {t})
                assert set(np.flatnonzero(got.attended[step, row, h]).tolist()) == chosen[h], (row, step, h)
                left_out += len(selected) - len(chosen[h])
            want = attend_to(q, k, v, t, [sorted(x) for x in chosen])
            np.testing.assert_allclose(got.outputs[step, row], want, atol=1e-4, rtol=0)
    return left_out


def test_quest_is_pruned_as_the_loops_say():
    """The kept tokens, attention to them by exact keys, and the 4-bit keys after the prompt and each step."""
    under_test = subject("twilight")
    got, rows = under_test.plain, under_test.rows

    def candidates(q, k, h, t, length):
        return quest.pick(q, k, h, t, budget=12, page_size=4)

    assert compare(got, rows, under_test.lengths, WRAPPERS["twilight"].mass, candidates) > 100
    keys = got.state.aux.keys
    stored, low_of, step_of = (np.asarray(x) for x in (keys.codes, keys.low, keys.step))
    for row, length in enumerate(under_test.lengths):
        rotated = rotate_all(rows[1][row], frequencies(16))
        for h, i in np.ndindex(rotated.shape[0], length + len(got.outputs)):
            codes, low, step = coded(rotated[h, i])
            packed = stored[row, h, i]
            assert [*(packed & 15).tolist(), *(packed >> 4).tolist()] == codes
            np.testing.assert_allclose((low_of[row, h, i], step_of[row, h, i]), (low, step), rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("mass", [0.05, 0.5, 0.99])
def test_another_mass_leaves_what_the_loops_say(mass):
    under_test = subject("twilight")
    got = under_test.drive(method=dataclasses.replace(under_test.method, mass=mass))
    compare(got, under_test.rows, under_test.lengths, mass, lambda q, k, h, t, n: quest.pick(q, k, h, t, 12, 4))


@pytest.mark.thorough
def test_a_list_of_tokens_is_pruned_like_one_of_pages():
    """And a method whose budget has room for all leaves all tokens to choose from."""
    under_test = subject("twilight")
    inner = example("retrievalattention")
    alone, got = (under_test.drive(method=x) for x in (inner, Twilight(method=inner, mass=0.6)))
    assert compare_lists(got, alone, under_test, 0.6) > 100
    everything = Quest(budget=96, page_size=4, num_dense_layers=0)
    got = under_test.drive(method=Twilight(method=everything, mass=0.6))
    assert compare(got, under_test.rows, under_test.lengths, 0.6, lambda q, k, h, t, n: set(range(t + 1))) > 100


def compare_lists(got, alone, under_test, mass):
    """`compare`, with the tokens that the inner method attends to by itself as candidates."""
    row_of = {int(length): row for row, length in enumerate(under_test.lengths)}

    def candidates(q, k, h, t, length):
        return set(np.flatnonzero(alone.attended[t - length, row_of[int(length)], h]).tolist())

    return compare(got, under_test.rows, under_test.lengths, mass, candidates)


@pytest.mark.thorough
def test_accounting_counts_the_method_and_4_bit_keys():
    """Half a byte for each channel and two numbers for each token of the method's selection."""
    under_test = subject("twilight")
    state, inner = under_test.plain.state, WRAPPERS["twilight"].method
    selected, metadata = inner.count(state.cache, state.aux.inner, None)
    kept, counted = WRAPPERS["twilight"].count(state.cache, state.aux, None)
    assert (np.asarray(kept) <= np.asarray(selected)).all() and np.asarray(kept).sum() < np.asarray(selected).sum()
    np.testing.assert_array_equal(counted, np.asarray(metadata) + np.asarray(selected) * (16 / 2 + 2 * 4))


def test_layers_that_the_method_leaves_dense_stay_dense():
    method = Twilight(method=Quest(budget=64, num_dense_layers=1), mass=0.5)
    assert method.for_layer(0, 2) == Full()
    assert method.for_layer(1, 2) == method
    mixed = Twilight(method=DenseBelow(length=9, method=Quest(budget=64, num_dense_layers=1)))
    assert not mixed.for_layer(0, 2).selects and mixed.for_layer(1, 2).selects


def test_what_selects_can_be_wrapped():
    """A wrapper of a wrapper too; and it can stand where a method that selects can."""
    for inner in (Quest(), ParisKV(), SOCKET(), RetrievalAttention(), Stages(evict=SnapKV(), retrieve=Quest())):
        made = Twilight(method=inner)
        assert made.evicts == inner.evicts and made.selects and made.mass == 0.85
    Stages(evict=SnapKV(), retrieve=DenseBelow(length=9, method=Twilight(method=Quest(offload=True))))
