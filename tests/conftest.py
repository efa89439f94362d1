"""Strict numerics for every test, and the devices tests may ask for."""

from __future__ import annotations

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key():
    """A fixed PRNG key."""
    return jax.random.key(0)
