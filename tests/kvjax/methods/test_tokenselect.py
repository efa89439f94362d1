"""TokenSelect beyond the generic comparison: long rows, and a selection that is reused."""

import numpy as np
import pytest

from tests.harness import drive, example, frequencies, oracle, random_tokens
from tests.kvjax.cases import against_oracle

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("tokenselect")]

SINK, BUDGET, LOCAL = (oracle("tokenselect").KNOBS[x] for x in ("num_sink", "budget", "num_local"))  # 2, 4, 8
LIMIT = SINK + BUDGET + LOCAL
DIM = 16


def often(*values):
    """A setting of a law that another setting shows: it runs under --thorough."""
    return pytest.param(*values, marks=pytest.mark.thorough)


@pytest.mark.slow
def test_prompts_of_twenty_times_the_limit_stay_finite():
    lengths = np.array([20 * LIMIT, 100])
    q, k, v = random_tokens(23, 2, 1, 2, lengths.max() + 8, DIM)
    got, _ = against_oracle("tokenselect", (q, k, v), lengths)
    assert np.isfinite(got.outputs).all()
    assert all(np.isfinite(got.prompt[row, :, :, :length]).all() for row, length in enumerate(lengths))
    assert (got.attended.sum(axis=3) == LIMIT).all()


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
    got = drive(example("tokenselect"), q, k, v, front + back + extra, prompt=prompt, inv_freq=inv_freq)
    for row, gap in enumerate(extra):
        at = np.where(where < front, where, where + gap)
        np.testing.assert_allclose(got.outputs[:, row], got.outputs[:, 0], atol=1e-5, rtol=0)
        np.testing.assert_array_equal(got.attended[:, row][..., at], got.attended[:, 0][..., where])
    assert (got.attended.sum(axis=3) == LIMIT).all()


def history(q, first, theta):
    """Refreshing steps of one row's queries q [H, G, T, D] when steps from ``first`` on are sparse."""
    refreshes = []
    for t in range(first, q.shape[2]):
        now = q[:, :, t].ravel().astype(np.float64)
        then = q[:, :, refreshes[-1]].ravel().astype(np.float64) if refreshes else None
        if then is None or now @ then < theta * np.linalg.norm(now) * np.linalg.norm(then):
            refreshes.append(t)
    return refreshes


@pytest.mark.parametrize(("walks", "theta"), [(False, 0.5), (True, 0.9), *(often(False, theta) for theta in (-1.0, 2.0))])
def test_a_selection_is_reused_while_the_query_stays_near(walks, theta):
    """Every step of a long generation is the oracle's, and its hits and misses are counted.

    Queries walk at random, so that neighbours are alike and strangers are not; or turn at a constant speed, another for each
    row, so that hits and misses fall on different steps.
    """
    lengths, steps = np.array([30, 10]), 200
    q, k, v = random_tokens(38, 2, 2, 2, lengths.max() + steps, DIM)
    base = np.linalg.qr(np.random.default_rng(1).normal(size=(4 * DIM, 2)))[0].T.reshape(2, 2, 2, 1, DIM)
    for t in range(1, q.shape[3] if walks else 0):
        q[..., t, :] = 0.97 * q[..., t - 1, :] + np.sqrt(1 - 0.97**2) * q[..., t, :]
    for row, speed in enumerate(() if walks else (0.08, 0.055)):
        angle = speed * np.arange(steps)[:, None]
        q[row, :, :, lengths[row] : lengths[row] + steps] = 12 * (np.cos(angle) * base[0] + np.sin(angle) * base[1])
    got, _ = against_oracle("tokenselect", (q, k, v), lengths, theta=theta)
    state, sparse = got.state, steps - np.maximum(LIMIT - lengths, 0)
    for row, length in enumerate(lengths):
        refreshes = history(q[row, :, :, : length + steps], max(length, LIMIT), theta)
        least, most = {-1.0: (1, 1), 2.0: (sparse[row],) * 2}.get(theta, (sparse[row] / 25, sparse[row] / 2))
        assert least <= len(refreshes) <= most, "the data should show hits and misses"
        assert int(state.refreshes[row]) == len(refreshes)
        assert int(state.hits[row]) == sparse[row] - len(refreshes)
    rate = example("tokenselect", theta=theta).cost(state, None).counters["hit_rate"]
    np.testing.assert_allclose(rate, np.asarray(state.hits) / sparse, atol=1e-6)
