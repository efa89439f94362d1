"""The gated delta rule and its convolution against loops over tokens in float64; what sizes refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.linear.delta import gated_delta
from models.layers.linear.layer import causal_convolution

pytestmark = pytest.mark.usefixtures("quick_compile")
ROWS, HEADS, GROUP, KEY, VALUE = 2, 2, 3, 5, 4
delta = jax.jit(gated_delta, static_argnames="chunk")


def oracle(query, key, value, decay, rate, state):
    """One row's rule, token by token in float64: [T, N, R, M] and the state [N, R, K, M]."""
    state, out = np.array(state, np.float64), []
    for q, k, v, g, b in zip(*(np.asarray(x, np.float64) for x in (query, key, value, decay, rate)), strict=True):
        made = np.zeros(v.shape)
        for n, r in np.ndindex(v.shape[:2]):
            asked, known = (x[n] / np.sqrt(x[n] @ x[n] + 1e-6) for x in (q, k))
            memory = np.exp(g[n, r]) * state[n, r]
            state[n, r] = memory + np.outer(known, b[n, r] * (v[n, r] - memory.T @ known))
            made[n, r] = state[n, r].T @ asked / np.sqrt(len(asked))
        out.append(made)
    return np.array(out), state


def draw(total, seed=0, decay=2.0):
    """Random arguments of `gated_delta` for two rows, without ``real``."""
    rng = np.random.default_rng(seed)
    heads = (ROWS, total, HEADS)
    query, key, value = (rng.normal(size=(*heads, *rest)) for rest in ((KEY,), (KEY,), (GROUP, VALUE)))
    rate = rng.uniform(0, 1, (*heads, GROUP))
    decays = -rng.exponential(decay, (*heads, GROUP))
    state = rng.normal(size=(ROWS, HEADS, GROUP, KEY, VALUE))
    return [x.astype(np.float32) for x in (query, key, value, decays, rate, state)]


def every(total):
    return jnp.ones((ROWS, total), bool)


def check(got, given, row, length):
    out, state = oracle(*(x[row, :length] for x in given[:5]), given[5][row])
    np.testing.assert_allclose(got[0][row, :length], out, atol=1e-5)
    np.testing.assert_allclose(got[1][row], state, atol=1e-5)


@pytest.mark.parametrize(
    ("total", "chunk"), [(1, 8), (23, 8), (65, 64), *(pytest.param(x, 64, marks=pytest.mark.thorough) for x in (2, 64, 130))]
)
def test_chunks_equal_a_loop_over_tokens(total, chunk):
    given = draw(total)
    got = delta(*given, every(total), chunk=chunk)
    assert got[0].dtype == got[1].dtype == jnp.float32
    for row in range(ROWS):
        check(got, given, row, total)


@pytest.mark.parametrize("length", [0, 1, 7, 9, 23])
def test_padding_changes_no_state_whatever_it_is(length):
    given = draw(23, seed=1)
    soiled = [x.copy() for x in given]
    for x in soiled[:5]:
        x[1, length:] = np.nan
    got = delta(*soiled, np.arange(23)[None] < np.array([[23], [length]]), chunk=8)
    check(got, given, 0, 23)
    if length:
        check(got, given, 1, length)
    else:
        np.testing.assert_array_equal(got[1][1], given[5][1])


def test_tokens_in_pieces_equal_all_at_once():
    *tokens, state = draw(23, seed=2)
    out, last = delta(*tokens, state, every(23), chunk=8)
    pieces = []
    for start, stop in ((0, 11), (11, 12), (12, 23)):
        piece, state = delta(*(x[:, start:stop] for x in tokens), state, every(stop - start), chunk=8)
        pieces.append(piece)
    np.testing.assert_allclose(np.concatenate(pieces, axis=1), out, atol=3e-6)
    np.testing.assert_allclose(state, last, atol=3e-6)


@pytest.mark.parametrize("decay", [1e-4, 60.0])
def test_strong_decay_and_equal_keys_stay_exact(decay):
    """exp(-60) has no inverse in float32 that a chunk could divide by; equal keys give the worst triangular system."""
    given = draw(65, seed=3, decay=decay)
    given[1][:] = given[1][:, :1]
    given[4][:] = 0.999
    got = delta(*given, every(65), chunk=64)
    check(got, given, 0, 65)


def test_a_convolution_equals_a_loop_and_keeps_the_newest_tokens():
    rng = np.random.default_rng(4)
    x, taps, before = (rng.normal(size=size).astype(np.float32) for size in ((2, 6, 2, 3), (2, 3, 4), (2, 2, 3, 3)))
    lengths = np.array([6, 2])
    soiled = x.copy()
    soiled[1, 2:] = np.nan
    out, kept = causal_convolution(*map(jnp.asarray, (soiled, taps, before)), jnp.arange(6)[None] < lengths[:, None])
    line = np.concatenate([before.transpose(0, 2, 1, 3), x], axis=1).astype(np.float64)
    for row, length in enumerate(lengths):
        for t in range(length):
            total = sum(line[row, t + at] * taps[:, :, at] for at in range(4))
            np.testing.assert_allclose(out[row, t], total / (1 + np.exp(-total)), atol=1e-6)
        np.testing.assert_array_equal(kept[row], line[row, length : length + 3].transpose(1, 0, 2).astype(np.float32))
