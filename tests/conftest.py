"""Strict numerics for every test, and the devices tests may ask for."""

from __future__ import annotations

import pathlib

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="module")
def quick_compile():
    """Compile without most of XLA's optimizations: a third less time for tests of many small programs.

    A module asks for it with ``pytestmark = pytest.mark.usefixtures("quick_compile")``; others compile as users do.
    """
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module", autouse=True)
def bounded_maps():
    """Forget compiled programs before Linux's 65,530 memory maps per process run out, which ends in a crash of XLA."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()


@pytest.fixture
def key():
    """A fixed PRNG key."""
    return jax.random.key(0)
