"""What only FreeKV has: the share of corrected heads, dense layers, whole pages. Its oracle runs in test_scan.py."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods import FreeKV
from kvjax.protocol.typing import EMPTY
from tests.harness import example, random_tokens
from tests.kvjax.cases import feed_layer, prefill_layer
from tests.oracles.freekv import cosine

pytestmark = pytest.mark.usefixtures("quick_compile")
SLOTS, STEPS, ASKED = 48, 5, 3
LENGTHS = np.array([30, 8, 30])  # the second has no pages to leave out, the third asks nothing and then goes on alone


def test_the_share_of_corrected_heads():
    """Only steps that could choose count; the query before comes from a step, or from the last of several tokens."""
    q, k, v = random_tokens(1, 3, 2, 2, SLOTS, 8)
    q[:, :, :, 1::2] = 0.7 * q[:, :, :, ::2] + 0.3 * q[:, :, :, 1::2]
    questions, order = np.array([ASKED, ASKED - 1, 0]), np.arange(ASKED)
    asked = np.where(order < questions[:, None], LENGTHS[:, None] + order, EMPTY)
    steps = [(LENGTHS + questions)[:, None] + step for step in range(STEPS)]

    def share(tau):
        method = dataclasses.replace(example("freekv"), tau=jnp.float32(tau))
        state = prefill_layer(method, (q, k, v), LENGTHS, prompt=30, room=SLOTS - 30)
        for at in (asked, *steps, np.full((3, 1), EMPTY)):  # the last step changes nothing
            _, state = feed_layer(method, state, (q, k, v), at)
        return np.asarray(method.counters(state.aux, None)["corrected"]), np.asarray(state.aux.compared)

    shares, compared = map(np.stack, zip(*map(share, (-2, 0.5, 2)), strict=True))
    np.testing.assert_array_equal(compared, [[STEPS, 0, STEPS - 1]] * 3)
    np.testing.assert_array_equal(shares[:, [0, 2]], [[0, 0], shares[1, [0, 2]], [1, 1]])
    np.testing.assert_array_equal(shares[:, 1], 0)
    for row in (0, 2):
        last = LENGTHS[row] + questions[row] + STEPS
        alike = [
            np.mean([cosine(np.float64(q[row, h, g, t]), np.float64(q[row, h, g, t - 1])) for g in range(2)])
            for t in range(last - int(compared[0, row]), last)
            for h in range(2)
        ]
        np.testing.assert_allclose(shares[1, row], np.mean(np.array(alike) < 0.5))
    assert 0 < shares[1, 0] < 1


def test_the_first_layer_is_dense():
    layers = [type(FreeKV().for_layer(layer, 4)).__name__ for layer in range(4)]
    assert layers == ["Full", "FreeKV", "FreeKV", "FreeKV"]
