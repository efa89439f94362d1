"""What only FreeKV has: the share of corrected heads, dense layers, whole pages. Its oracle runs in test_scan.py."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.cache import PlainCache
from kvjax.methods import FreeKV
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.typing import EMPTY
from tests.harness import example, random_tokens
from tests.oracles.freekv import cosine

pytestmark = pytest.mark.usefixtures("quick_compile")
SLOTS, STEPS, ASKED = 48, 5, 3
LENGTHS = np.array([30, 8, 30])  # the second has no pages to leave out, the third asks nothing and then goes on alone


def test_the_share_of_corrected_heads():
    """Only steps that could choose count; the query before comes from a step, or from the last of several tokens."""
    q, k, v = random_tokens(1, 3, 2, 2, SLOTS, 8)
    q[:, :, :, 1::2] = 0.7 * q[:, :, :, ::2] + 0.3 * q[:, :, :, 1::2]
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    questions = np.array([ASKED, ASKED - 1, 0])

    def step(method, carry, position):
        cache, aux = carry
        query, key, value = (
            jnp.take_along_axis(x, jnp.maximum(position, 0).reshape(3, *(1,) * (x.ndim - 3), -1, 1), axis=-2)
            for x in (q, k, v)
        )
        cache = cache.append(key, value, position)
        return method.update(cache, aux, Step(query=query, position=position, tokens=position, shared=None), None)

    def share(tau):
        method = dataclasses.replace(example("freekv"), tau=tau)
        at = jnp.arange(SLOTS, dtype=jnp.int32)[None, None]
        stored = jnp.broadcast_to(at < LENGTHS[:, None, None], k.shape[:3])
        cache = PlainCache(key=k, value=v, position=jnp.where(stored, at, EMPTY), cursor=jnp.asarray(LENGTHS, jnp.int32))
        nothing = jnp.zeros((3, 0), jnp.int32)
        prompt = Prompt(query=q[:, :, :, :0], query_position=nothing, mass=jnp.zeros((3, 2, 0)), tokens=nothing)
        order = jnp.arange(ASKED, dtype=jnp.int32)[None]
        asked = jnp.where(order < questions[:, None], LENGTHS[:, None].astype(np.int32) + order, EMPTY)
        carry = step(method, method.compress(cache, prompt, SLOTS), asked)
        active = jnp.arange(STEPS + 1) < STEPS  # the last step changes nothing

        def one(carry, active):
            return step(method, carry, jnp.where(active, carry[0].cursor[:, None], EMPTY)), None

        aux = jax.lax.scan(one, carry, active)[0][1]
        return method.counters(aux, None)["corrected"], aux.compared

    taus = np.array([-2, 0.5, 2], np.float32)
    shares, compared = jax.jit(jax.vmap(share))(taus)
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
