"""TokenSelect beyond the generic comparison: votes, the selection cache, slot geometry and long rows."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from tests.harness import drive, example, frequencies, oracle, random_tokens, stored
from tests.kvjax.cases import compare

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("tokenselect")]

SINK, BUDGET, LOCAL = (oracle("tokenselect").KNOBS[x] for x in ("num_sink", "budget", "num_local"))  # 2, 4, 8
LIMIT = SINK + BUDGET + LOCAL
DIM = 16


def often(*values):
    """A setting of a law that another setting shows: it runs under --thorough."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def make(**knobs):
    return example("tokenselect", **knobs)


def against_oracle(q, k, v, lengths, inv_freq=None, fields=None, **knobs):
    """Drive the method and its oracle on the same rows; ``fields`` are the method's only. Returns the `harness.Drive`."""
    inv_freq = frequencies(q.shape[-1]) if inv_freq is None else inv_freq
    got = drive(make(**knobs, **(fields or {})), q, k, v, lengths, prompt=int(max(lengths)), inv_freq=inv_freq)
    compare("tokenselect", {**oracle("tokenselect").KNOBS, **knobs}, q, k, v, lengths, inv_freq, got)
    return got


def same(got, want, lengths):
    """Assert that two drives agree, prompts compared where they are real."""
    for row, length in enumerate(lengths):
        prompts = (x.prompt[row, :, :, :length] for x in (got, want))
        np.testing.assert_allclose(*prompts, atol=1e-5, rtol=0)
    np.testing.assert_allclose(got.outputs, want.outputs, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(got.attended, want.attended)


def turn(x, position, inv_freq):
    """RoPE in float64 of x [..., N, D] at ``position`` [N]."""
    angle = np.asarray(position, np.float64)[:, None] * np.asarray(inv_freq, np.float64)
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(logits):
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def weights(method, q, k, prompt, inv_freq, padded=None):
    """Attention probabilities of one row's q [H, G, T, D] and k [H, T, D], read off the outputs alone.

    Row b of the batch has a value in token b only. Returns float [H, G, prompt, T] of the prompt's queries and
    [N, H, G, T] of the decode steps'. The prompt is padded to ``padded`` tokens; None does not pad it.
    """
    padded = padded or prompt
    total = k.shape[1]
    v = np.zeros((total, k.shape[0], total, k.shape[2]), np.float32)
    v[np.arange(total), :, np.arange(total), 0] = 1
    rows = [np.repeat(x[None], total, axis=0) for x in (q, k)]
    got = drive(method, *rows, v, [prompt] * total, prompt=padded, inv_freq=inv_freq)
    return np.moveaxis(got.prompt[..., :prompt, 0], 0, -1), np.moveaxis(got.outputs[..., 0], 1, -1)


@pytest.mark.slow
def test_prompts_of_twenty_times_the_limit_stay_finite():
    lengths = np.array([20 * LIMIT, 100])
    q, k, v = random_tokens(23, 2, 1, 2, lengths.max() + 8, DIM)
    got = against_oracle(q, k, v, lengths)
    assert np.isfinite(got.outputs).all()
    assert all(np.isfinite(got.prompt[row, :, :, :length]).all() for row, length in enumerate(lengths))
    assert (got.attended.sum(axis=3) == LIMIT).all()


# ---- the vote -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, often(4)])
def test_equal_scores_choose_the_first_candidates(kernel):
    q, k, _ = random_tokens(24, 1, 2, 2, 30 + 5, DIM)
    k[:] = 0
    prompt, decoded = weights(make(kernel=kernel), q[0], k[0], 30, frequencies(DIM))
    for step in range(5):
        length = 31 + step
        want = [*range(SINK + BUDGET), *range(length - LOCAL, length)]
        assert np.flatnonzero(decoded[step, 0, 0] > 0).tolist() == want
    assert np.flatnonzero(prompt[0, 0, 29] > 0).tolist() == [*range(SINK + BUDGET), *range(30 - LOCAL, 30)]


def test_needle_is_attended_inside_the_prompt():
    """Every query of the last chunk asks for it; no rotation, so that their mean does too."""
    prompt = 60
    spots = np.arange(prompt - 4)
    q, k, v = random_tokens(26, prompt, 1, 2, prompt + 1, DIM)
    direction = np.random.default_rng(0).normal(size=DIM)
    q[..., 56:60, :] = 4 * direction / np.linalg.norm(direction)
    k[spots, 0, spots] = 4 * q[0, 0, 0, 56]
    v[:] = 0
    v[spots, 0, spots] = 1
    got = drive(make(), q, k, v, [prompt] * prompt, prompt=prompt, inv_freq=np.zeros(DIM // 2, np.float32))
    assert (got.prompt[spots, :, :, 56:] > 0.9).all()


@pytest.mark.thorough
def test_votes_find_what_a_loud_head_would_drown_in_a_sum_of_logits():
    """One head with large aimless logits, one that points at a needle."""
    prompt = 60
    spots = np.arange(SINK, prompt - LOCAL)
    q, k, v = random_tokens(27, len(spots), 2, 1, prompt + 1, DIM)
    q[:, 0] *= 10
    q[:, 1, 0, -1] /= 1.5
    k[np.arange(len(spots)), 1, spots] = 4 * q[:, 1, 0, -1] / np.linalg.norm(q[:, 1, 0, -1], axis=-1, keepdims=True)
    got = drive(make(), q, k, v, [prompt] * len(spots), prompt=prompt, inv_freq=np.zeros(8, np.float32))
    assert got.attended[0, np.arange(len(spots)), 0, spots].mean() > 0.95


# ---- slots and positions --------------------------------------------------------------------------------------------


@functools.cache
def marked():
    """One row whose tokens 3..6 every query chooses, through a channel pair that does not rotate: q, k, inv_freq."""
    q, k, _ = (x[0] for x in random_tokens(30, 1, 2, 2, 47, DIM))
    inv_freq = frequencies(DIM)
    inv_freq[-1] = 0
    q[..., -1] = 6
    k[..., -1] = 0
    k[:, 3:7, -1] = 6
    return q, k, inv_freq


@pytest.mark.parametrize("chunk", [8, often(5)])
def test_tokens_are_seen_at_the_distances_of_their_slots(chunk):
    """Who is seen, and at which distance, in every prompt chunk and decode step; nothing depends on N."""
    q, k, inv_freq = marked()
    prompt, total = 37, k.shape[1]
    seen, decoded = weights(make(chunk=chunk, theta=2.0), q, k, prompt, inv_freq)
    pieces = [(first, min(chunk, prompt - first)) for first in range(0, prompt, chunk)]
    pieces += [(t, 1) for t in range(prompt, total)]
    for first, count in pieces:
        length = first + count
        slots = [0, 1, 3, 4, 5, 6, *range(length - LOCAL, length)] if length > LIMIT else [*range(length)]
        place = np.arange(len(slots) - count, len(slots))  # of the queries; the largest position of all is LIMIT - 1
        assert place.max() <= LIMIT - 1
        key = turn(k[:, slots], np.arange(len(slots)), inv_freq)
        query = turn(q[:, :, first:length], place, inv_freq)
        logits = np.einsum("hgtd,hsd->hgts", query, key) / np.sqrt(DIM)
        logits = np.where(np.arange(len(slots)) <= place[:, None], logits, -np.inf)
        want = np.zeros((2, 2, count, total))
        want[..., slots] = softmax(logits)
        got = seen[:, :, first:length] if first < prompt else decoded[first - prompt][:, :, None]
        np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)
        np.testing.assert_array_equal(got > 0, want > 0)
    if chunk == LOCAL:  # a full chunk is its own window, a short last one sees num_local - C tokens before it
        first, last = (np.flatnonzero(seen[0, 0, t]).tolist() for t in (24, 32))
        assert first == [0, 1, 3, 4, 5, 6, 24] and last == [0, 1, 3, 4, 5, 6, 29, 30, 31, 32]


def test_tokens_nobody_chooses_change_nothing():
    """Any number of them between the same others: positions are re-numbered, so the outputs are the same."""
    steps, front, back, extra = 12, 12, 12, np.array([0, 8, 88, 1000])
    inv_freq = frequencies(DIM)
    inv_freq[-1] = 0
    core_q, core_k, core_v = (x[0] for x in random_tokens(33, 1, 2, 2, front + back + steps, DIM))
    prompt = int(front + extra.max() + back)
    q, k, v = random_tokens(34, len(extra), 2, 2, prompt + steps, DIM)
    core_q[..., -1], core_k[..., -1], k[..., -1] = 8, 0, -8
    where = np.arange(front + back + steps)
    for row, gap in enumerate(extra):
        at = np.where(where < front, where, where + gap)
        q[row][:, :, at], k[row][:, at], v[row][:, at] = core_q, core_k, core_v
    got = drive(make(), q, k, v, front + back + extra, prompt=prompt, inv_freq=inv_freq)
    for row, gap in enumerate(extra):
        at = np.where(where < front, where, where + gap)
        np.testing.assert_allclose(got.outputs[:, row], got.outputs[:, 0], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(got.attended[:, row][..., at], got.attended[:, 0][..., where])
    assert (got.attended.sum(axis=3) == LIMIT).all()


# ---- the selection cache --------------------------------------------------------------------------------------------


def history(q, first, theta):
    """Refreshing steps of one row's queries q [H, G, T, D] when steps from ``first`` on are sparse."""
    refreshes = []
    for t in range(first, q.shape[2]):
        now = q[:, :, t].ravel().astype(np.float64)
        then = q[:, :, refreshes[-1]].ravel().astype(np.float64) if refreshes else None
        if then is None or now @ then < theta * np.linalg.norm(now) * np.linalg.norm(then):
            refreshes.append(t)
    return refreshes


@pytest.mark.parametrize("theta", [often(-1.0), 0.5, often(0.9), often(2.0)])
def test_selection_is_reused_while_the_query_stays_near(theta):
    """Queries that turn at a constant speed, another for each row: hits and misses fall on different steps."""
    lengths, speeds, steps = np.array([20, 9, 33]), (0.08, 0.055, 0.1), 30
    q, k, v = random_tokens(36, 3, 2, 2, lengths.max() + steps, DIM)
    base = np.linalg.qr(np.random.default_rng(1).normal(size=(4 * DIM, 2)))[0].T.reshape(2, 2, 2, 1, DIM)
    for row, speed in enumerate(speeds):
        angle = speed * np.arange(steps)[:, None]
        turned = slice(lengths[row], lengths[row] + steps)
        q[row, :, :, turned] = 12 * (np.cos(angle) * base[0] + np.sin(angle) * base[1])
    got = against_oracle(q, k, v, lengths, theta=theta)
    state, sparse = got.state, steps - np.maximum(LIMIT - lengths, 0)
    for row, length in enumerate(lengths):
        end = length + steps
        refreshes = history(q[row, :, :, :end], max(length, LIMIT), theta)
        assert int(state.refreshes[row]) == len(refreshes)
        assert int(state.hits[row]) == sparse[row] - len(refreshes)
        np.testing.assert_array_equal(state.query[row], q[row, :, :, refreshes[-1]])
        seen = np.flatnonzero(got.attended[-1, row, 0])
        np.testing.assert_array_equal(np.sort(state.chosen[row]), seen[SINK : SINK + BUDGET])
        if theta in (0.5, 0.9):
            assert 1 < len(refreshes) < sparse[row], "the data should show hits and misses"
    assert np.asarray(state.ready).all() and (theta != 2.0 or not np.asarray(state.hits).any())
    assert theta != -1.0 or (np.asarray(state.refreshes) == 1).all()
    rate = make(theta=theta).cost(state, None).counters["hit_rate"]
    np.testing.assert_allclose(rate, np.asarray(state.hits) / sparse, atol=1e-6)


@pytest.mark.parametrize("steps", [200, often(2000)])
def test_every_step_of_a_long_generation_follows_the_definition(steps):
    """Every step of a long generation against the definition, on arrays; a near-tie in the vote may fall either way."""
    lengths, theta = np.array([30, 10]), 0.9
    q, k, v = random_tokens(38, 2, 2, 2, lengths.max() + steps, DIM)
    for t in range(1, q.shape[3]):  # a random walk: neighbours are alike, strangers are not
        q[..., t, :] = 0.97 * q[..., t - 1, :] + np.sqrt(1 - 0.97**2) * q[..., t, :]
    inv_freq = frequencies(DIM)
    got = drive(make(theta=theta), q, k, v, lengths, prompt=30, inv_freq=inv_freq)
    cache, state = stored(got.state), got.state
    for row, length in enumerate(lengths):
        end = length + steps
        np.testing.assert_array_equal(cache.key[row, :, :end], k[row, :, :end])
        np.testing.assert_array_equal(cache.value[row, :, :end], v[row, :, :end])
        np.testing.assert_array_equal(cache.position[row, :, :end], np.broadcast_to(np.arange(end), (2, end)))
        assert int(cache.cursor[row]) == end
        refreshes = history(q[row, :, :, :end], max(length, LIMIT), theta)
        sparse = steps - max(LIMIT - length, 0)
        assert steps / 20 < len(refreshes) < steps / 2
        assert int(state.refreshes[row]) == len(refreshes)
        assert int(state.hits[row]) + int(state.refreshes[row]) == sparse
        for step in range(steps):
            check_step(got, row, step, q[row], k[row], v[row], length + step, length + step in refreshes, inv_freq)


def check_step(got, row, step, q, k, v, t, refreshed, inv_freq):
    """Assert one decode step of a long generation: the token at ``t`` has just been stored."""
    seen = np.flatnonzero(got.attended[step, row, 0])
    assert (got.attended[step, row] == got.attended[step, row, :1]).all()
    assert np.flatnonzero(got.kept[step, row, 0]).tolist() == list(range(t + 1))
    if t + 1 <= LIMIT:
        assert seen.tolist() == list(range(t + 1))
    else:
        assert len(seen) == LIMIT
        assert [*seen[:SINK], *seen[-LOCAL:]] == [*range(SINK), *range(t + 1 - LOCAL, t + 1)]
        chosen = seen[SINK:-LOCAL]
        if not refreshed:
            assert (chosen == np.flatnonzero(got.attended[step - 1, row, 0])[SINK:-LOCAL]).all()
        else:
            query = turn(q[:, :, t : t + 1], [LOCAL], inv_freq)[:, :, 0]
            vote = softmax(np.einsum("hgd,htd->hgt", query, k[:, SINK : t + 1 - LOCAL])).sum(axis=(0, 1))
            rest = np.delete(vote, chosen - SINK)
            assert vote[chosen - SINK].min() >= rest.max() * (1 - 1e-4)
    key = turn(k[:, seen], np.arange(len(seen)), inv_freq)
    query = turn(q[:, :, t : t + 1], [len(seen) - 1], inv_freq)[:, :, 0]
    weight = softmax(np.einsum("hgd,hsd->hgs", query, key) / np.sqrt(DIM))
    want = np.einsum("hgs,hsd->hgd", weight, v[:, seen])
    np.testing.assert_allclose(got.outputs[step, row], want, atol=1e-4, rtol=0)


def test_a_chunk_longer_than_the_window_is_refused():
    with pytest.raises(ValueError, match="TokenSelect: chunk must be at most num_local=8.*got 9"):
        make(chunk=9)
