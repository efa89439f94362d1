"""TokenSelect beyond the generic comparison: votes, the selection cache, slot geometry and long rows."""

import numpy as np
import pytest

from tests.harness import drive, example, frequencies, oracle, random_tokens, stored
from tests.kvjax.cases import against_oracle

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("tokenselect")]

SINK, BUDGET, LOCAL = (oracle("tokenselect").KNOBS[x] for x in ("num_sink", "budget", "num_local"))  # 2, 4, 8
LIMIT = SINK + BUDGET + LOCAL
DIM, PROMPT, TOTAL = 16, 37, 47  # of the tests that read a row's weights: as many rows as tokens, in one program


def often(*values):
    """A setting of a law that another setting shows: it runs under --thorough."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def make(**knobs):
    return example("tokenselect", **knobs)


def turn(x, position, inv_freq):
    """RoPE in float64 of x [..., N, D] at ``position`` [N]."""
    angle = np.asarray(position, np.float64)[:, None] * np.asarray(inv_freq, np.float64)
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(logits):
    weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def weights(method, q, k, inv_freq):
    """Attention probabilities of one row's q [H, G, TOTAL, D] and k [H, TOTAL, D], read off the outputs alone.

    Row b of the batch has a value in token b only. Returns float [H, G, PROMPT, TOTAL] of the prompt's queries and
    [N, H, G, TOTAL] of the decode steps'.
    """
    v = np.zeros((TOTAL, k.shape[0], TOTAL, k.shape[2]), np.float32)
    v[np.arange(TOTAL), :, np.arange(TOTAL), 0] = 1
    rows = [np.repeat(x[None], TOTAL, axis=0) for x in (q, k)]
    got = drive(method, *rows, v, [PROMPT] * TOTAL, prompt=PROMPT, inv_freq=inv_freq)
    return np.moveaxis(got.prompt[..., 0], 0, -1), np.moveaxis(got.outputs[..., 0], 1, -1)


@pytest.mark.slow
def test_prompts_of_twenty_times_the_limit_stay_finite():
    lengths = np.array([20 * LIMIT, 100])
    q, k, v = random_tokens(23, 2, 1, 2, lengths.max() + 8, DIM)
    got, _ = against_oracle("tokenselect", (q, k, v), lengths)
    assert np.isfinite(got.outputs).all()
    assert all(np.isfinite(got.prompt[row, :, :, :length]).all() for row, length in enumerate(lengths))
    assert (got.attended.sum(axis=3) == LIMIT).all()


# ---- the vote -----------------------------------------------------------------------------------------------------


def test_equal_scores_choose_the_first_candidates():
    q, k, _ = random_tokens(24, 1, 2, 2, TOTAL, DIM)
    k[:] = 0
    prompt, decoded = weights(make(), q[0], k[0], frequencies(DIM))
    for step in range(TOTAL - PROMPT):
        length = PROMPT + 1 + step
        want = [*range(SINK + BUDGET), *range(length - LOCAL, length)]
        assert np.flatnonzero(decoded[step, 0, 0] > 0).tolist() == want
    assert np.flatnonzero(prompt[0, 0, 31] > 0).tolist() == [*range(SINK + BUDGET), *range(32 - LOCAL, 32)]


def test_needle_is_attended_inside_the_prompt():
    """Every query of the last chunk asks for it; no rotation, so that their mean does too."""
    first, spots = 32, np.arange(32)
    q, k, v = random_tokens(26, TOTAL, 2, 2, TOTAL, DIM)
    direction = np.random.default_rng(0).normal(size=DIM)
    q[..., first:PROMPT, :] = 4 * direction / np.linalg.norm(direction)
    k[spots, :, spots] = 4 * q[0, 0, 0, first]
    v[:] = 0
    v[spots, :, spots] = 1
    got = drive(make(), q, k, v, [PROMPT] * TOTAL, prompt=PROMPT, inv_freq=np.zeros(DIM // 2, np.float32))
    assert (got.prompt[spots, :, :, first:PROMPT] > 0.9).all()


# ---- slots and positions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [8, often(5)])
def test_tokens_are_seen_at_the_distances_of_their_slots(chunk):
    """Who is seen, and at which distance, in every prompt chunk and decode step; nothing depends on N.

    Every query chooses tokens 3..6, through a channel pair that does not rotate.
    """
    q, k, _ = (x[0] for x in random_tokens(30, 1, 2, 2, TOTAL, DIM))
    inv_freq = frequencies(DIM)
    inv_freq[-1] = 0
    q[..., -1] = 6
    k[..., -1] = 0
    k[:, 3:7, -1] = 6
    seen, decoded = weights(make(chunk=chunk, theta=2.0), q, k, inv_freq)
    pieces = [(first, min(chunk, PROMPT - first)) for first in range(0, PROMPT, chunk)]
    pieces += [(t, 1) for t in range(PROMPT, TOTAL)]
    for first, count in pieces:
        length = first + count
        slots = [0, 1, 3, 4, 5, 6, *range(length - LOCAL, length)] if length > LIMIT else [*range(length)]
        place = np.arange(len(slots) - count, len(slots))  # of the queries; the largest position of all is LIMIT - 1
        assert place.max() <= LIMIT - 1
        key = turn(k[:, slots], np.arange(len(slots)), inv_freq)
        query = turn(q[:, :, first:length], place, inv_freq)
        logits = np.einsum("hgtd,hsd->hgts", query, key) / np.sqrt(DIM)
        logits = np.where(np.arange(len(slots)) <= place[:, None], logits, -np.inf)
        want = np.zeros((2, 2, count, TOTAL))
        want[..., slots] = softmax(logits)
        got = seen[:, :, first:length] if first < PROMPT else decoded[first - PROMPT][:, :, None]
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


@pytest.mark.parametrize(
    ("walks", "theta", "steps"),
    [(False, 0.5, 200), (True, 0.9, 200), *(often(False, theta, 200) for theta in (-1.0, 0.9, 2.0)), often(True, 0.9, 2000)],
)
def test_every_step_of_a_long_generation_follows_the_definition(walks, theta, steps):
    """A selection is reused while the query stays near. A near-tie in the vote may fall either way.

    Queries walk at random, so that neighbours are alike and strangers are not; or turn at a constant speed, another for each
    row, so that hits and misses fall on different steps.
    """
    lengths = np.array([30, 10])
    q, k, v = random_tokens(38, 2, 2, 2, lengths.max() + steps, DIM)
    base = np.linalg.qr(np.random.default_rng(1).normal(size=(4 * DIM, 2)))[0].T.reshape(2, 2, 2, 1, DIM)
    for t in range(1, q.shape[3] if walks else 0):
        q[..., t, :] = 0.97 * q[..., t - 1, :] + np.sqrt(1 - 0.97**2) * q[..., t, :]
    for row, speed in enumerate(() if walks else (0.08, 0.055)):
        angle = speed * np.arange(steps)[:, None]
        q[row, :, :, lengths[row] : lengths[row] + steps] = 12 * (np.cos(angle) * base[0] + np.sin(angle) * base[1])
    inv_freq = frequencies(DIM)
    got = drive(make(theta=theta), q, k, v, lengths, prompt=30, inv_freq=inv_freq)
    cache, state, sparse = stored(got.state), got.state, steps - np.maximum(LIMIT - lengths, 0)
    for row, length in enumerate(lengths):
        end = length + steps
        np.testing.assert_array_equal(cache.key[row, :, :end], k[row, :, :end])
        np.testing.assert_array_equal(cache.value[row, :, :end], v[row, :, :end])
        np.testing.assert_array_equal(cache.position[row, :, :end], np.broadcast_to(np.arange(end), (2, end)))
        assert int(cache.cursor[row]) == end
        refreshes = history(q[row, :, :, :end], max(length, LIMIT), theta)
        least, most = {-1.0: (1, 1), 2.0: (sparse[row],) * 2}.get(theta, (sparse[row] / 25, sparse[row] / 2))
        assert least <= len(refreshes) <= most, "the data should show hits and misses"
        assert int(state.refreshes[row]) == len(refreshes)
        assert int(state.hits[row]) == sparse[row] - len(refreshes)
        np.testing.assert_array_equal(state.query[row], q[row, :, :, refreshes[-1]])
        seen = np.flatnonzero(got.attended[-1, row, 0])
        np.testing.assert_array_equal(np.sort(state.chosen[row]), seen[SINK : SINK + BUDGET])
        for step in range(steps):
            check_step(got, row, step, q[row], k[row], v[row], length + step, length + step in refreshes, inv_freq)
    assert np.asarray(state.ready).all()
    rate = make(theta=theta).cost(state, None).counters["hit_rate"]
    np.testing.assert_allclose(rate, np.asarray(state.hits) / sparse, atol=1e-6)


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
