"""OracleEviction: Full's answer and the tokens that stay, against the oracle on recorded q, k, v and logits."""

import functools

import jax
import numpy as np
import pytest

import kvjax
from kvjax.methods import Full, OracleEviction
from kvjax.protocol.typing import pytree
from kvjax.testing.layer import random_tokens, stored
from tests import tape
from tests.harness import TINY, repeated, tiny_params
from tests.oracles import oracleeviction as oracle

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("oracleeviction")]
STEPS = 3
ROWS, TOTAL = len(oracle.LENGTHS), max(oracle.LENGTHS) + 10
SETTINGS = [{}, {"by": "output"}, {"by": "random"}, {"ahead": 1}]


@functools.cache
def recording():
    """A tape and its parameters: two layers of two KV heads, a row for each length."""
    q, k, v = (x.reshape(2, ROWS, *x.shape[1:]) for x in random_tokens(1, 2 * ROWS, 2, 2, TOTAL, 8))
    logits = np.random.default_rng(2).normal(size=(ROWS, TOTAL, TOTAL))
    ends = (int(oracle.answered(logits[1], oracle.LENGTHS[1], 3, ())[2]),)  # the second row's third token
    return tape.record(*(np.asarray(x, np.float32) for x in (q, k, v, logits)), eos_token_ids=ends)


@pytest.mark.parametrize("changed", repeated([pytest.param(x, id=str(x)) for x in SETTINGS], but=({},)))
def test_ragged_rows_keep_what_the_oracle_says(changed):
    knobs, (player, params) = {**oracle.KNOBS, **changed}, recording()
    cache = tape.read(player, params, oracle.LENGTHS, OracleEviction(**knobs), STEPS)
    held = [np.asarray(stored(layer).position) for layer in cache.layers]
    outputs = np.asarray(tape.decode(params, cache, np.ones((STEPS, ROWS), bool))[1])
    q, k, v, logits = (np.asarray(params[name]) for name in ("q", "k", "v", "logits"))
    for row, length in enumerate(oracle.LENGTHS):
        parts = q[:, row], k[:, row], v[:, row], logits[row], length, player.inv_freq
        got = [[set(x[x >= 0].tolist()) for x in layer[row]] for layer in held]
        assert got == oracle.kept(*parts, **knobs, ends=player.eos_token_ids), f"prompt of {length}"
        if length == max(oracle.LENGTHS):
            for layer, trace in enumerate(oracle.run(*parts, **knobs, ends=player.eos_token_ids)):
                np.testing.assert_allclose(outputs[:, layer, row], trace.outputs[:STEPS], atol=1e-4)


@pytest.mark.thorough
def test_the_answer_that_it_scores_by_is_fulls():
    """Passes behind the prompt give the tokens that `kvjax.generate` gives step by step."""
    found = []

    @pytree
    class Listening(OracleEviction):
        """It tells its answer."""

        def reread(self, states, reading):
            caches = tuple(state.cache.resident() for state in states)
            jax.debug.callback(found.append, self._decoded(caches, reading)[0])
            return OracleEviction.reread(self, states, reading)

    prompts = np.random.default_rng(0).integers(0, 60, (3, 40)).astype(np.int32)
    given = {"config": TINY, "max_new_tokens": 8, "pad_multiple": 1, "lengths": np.array([40, 17, 33])}
    full = kvjax.prefill(tiny_params(), prompts, method=Full(), **given)
    want = kvjax.generate(tiny_params(), full, max_new_tokens=8, eos_token_ids=()).tokens
    kvjax.prefill(tiny_params(), prompts, method=Listening(budget=8, ahead=8), **given)
    jax.effects_barrier()
    np.testing.assert_array_equal(found[0], want)
