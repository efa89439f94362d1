"""Seconds of device work, without the dispatch: many runs inside one compiled loop, each depending on the one before."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Time of one run, over repeats.

    Attributes:
        median: seconds.
        least: seconds, the fastest repeat.
        most: seconds, the slowest repeat.
        compile: seconds until the program was ready.
    """

    median: float
    least: float
    most: float
    compile: float


def loop_seconds(
    run: Callable[..., Any], *args: Any, chain: int = 8, iterations: int = 20, repeats: int = 7
) -> Seconds:
    """Time of ``run(*args)`` alone.

    ``chain`` runs follow each other in the body of a loop of fixed length, each with a first argument that depends on the
    result before it. Barriers keep a compiler from what a loop would let it do: overlap runs, move what does not change out
    of the loop, or leave out what nobody reads. The first argument is written anew for every run, so it should be small, and
    the loop has a step of its own; a chain without ``run`` measures both, and they are subtracted.

    Args:
        run: any function of arrays; not timed on its first call.
        *args: its arguments; the first is a float array.
        chain: runs per iteration.
        iterations: of the loop.
        repeats: measurements.
    """
    begun = time.perf_counter()
    loop = jax.jit(_loop, static_argnums=(0, 1, 2)).lower(run, chain, iterations, *args).compile()
    jax.block_until_ready(loop(*args))
    compile_seconds = time.perf_counter() - begun
    nothing = (args[0], jnp.zeros((1,), jnp.float32))
    bare = jax.jit(_loop, static_argnums=(0, 1, 2)).lower(_second, chain, iterations, *nothing).compile()
    jax.block_until_ready(bare(*nothing))
    return over(spans(loop, args, repeats), spans(bare, nothing, repeats), chain * iterations, compile_seconds)


def spans(program: Callable[..., Any], args: tuple, repeats: int) -> list[float]:
    """Wall-clock seconds of each of ``repeats`` calls."""
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(program(*args))
        found.append(time.perf_counter() - begun)
    return found


def over(whole: list[float], bare: list[float], runs: int, compile_seconds: float) -> Seconds:
    """Seconds per run from repeats of ``runs`` runs and from repeats of the same loop without them.

    Of those without, the fastest counts: it is so short that a busy host doubles it, and the runs would seem faster.
    """
    rest = min(bare)
    median, least, most = ((x - rest) / runs for x in (statistics.median(whole), min(whole), max(whole)))
    return Seconds(median=median, least=least, most=most, compile=compile_seconds)


def touch(first: jax.Array, result: Any) -> jax.Array:
    """``first``, unchanged, but only to be had when all of ``result`` is."""
    odd = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(lax.optimization_barrier(result)):
        # Never true, but no compiler can know.
        odd = odd | (leaf[(0,) * leaf.ndim].astype(jnp.float32) == 1.2345678e33)
    return first + odd.astype(first.dtype)


def _loop(run: Callable[..., Any], chain: int, iterations: int, *args: Any) -> jax.Array:
    def body(_: jax.Array, first: jax.Array) -> jax.Array:
        for _ in range(chain):
            # All of it is used below: what is not leaves the barrier, and could then leave the loop.
            first, *others = lax.optimization_barrier((first, *args[1:]))
            first = touch(first, run(first, *others))
        return first

    return lax.fori_loop(0, iterations, body, args[0])


def _second(first: jax.Array, second: jax.Array) -> jax.Array:
    return second
