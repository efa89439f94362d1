"""Full attention under other positions: NTK, PI and SelfExtend."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods import NTK, PI


def test_ntk_leaves_the_first_frequency_and_divides_the_last_by_the_factor():
    divisors = np.asarray(NTK(factor=4.0).divisors(32))
    assert divisors[0] == 1 and divisors[-1] == pytest.approx(4.0) and (np.diff(divisors) > 0).all()
    base, dim = 5e5, 64  # the base of Llama 3 becomes b * s^(D / (D - 2))
    old, new = (b ** (-np.arange(0, dim, 2) / dim) for b in (base, base * 4 ** (dim / (dim - 2))))
    np.testing.assert_allclose(old / divisors, new, rtol=1e-6)


def test_pi_divides_every_frequency():
    np.testing.assert_array_equal(PI(factor=2.5).divisors(3), np.full(3, 2.5, np.float32))


@pytest.mark.parametrize("kind", [NTK, PI])
def test_a_factor_of_one_divides_by_exactly_one(kind):
    """Then it is Full to the last bit, compiled or not, and can share a prefill."""
    for divisors in (kind.divisors, jax.jit(kind.divisors, static_argnames="pairs")):
        for pairs in (1, 32, 64, 128):
            np.testing.assert_array_equal(divisors(kind(factor=1.0), pairs=pairs), np.ones(pairs, np.float32))
    assert kind(factor=1).dense_prompt and kind(factor=jnp.float32(1.0)).dense_prompt
    assert not kind(factor=1.5).dense_prompt and not kind().dense_prompt
    jax.jit(lambda method: method.dense_prompt or method.factor)(kind(factor=1.0))  # nobody knows a traced factor
