"""Seconds of device work without the dispatch: many runs inside a compiled loop, each depending on the run before it."""

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
    """The time of a run, over several repeats.

    Attributes:
        median: seconds.
        least: seconds of the fastest repeat.
        most: seconds of the slowest repeat.
        compile: seconds until the program was ready.
    """

    median: float
    least: float
    most: float
    compile: float


def loop_seconds(run: Callable[..., Any], *args: Any, chain: int = 8, iterations: int = 20, repeats: int = 7) -> Seconds:
    """Measure the time of ``run(*args)`` alone.

    ``chain`` runs follow each other in the body of a loop of fixed length. The first argument of each run depends on the
    result of the run before it. In a loop, a compiler could overlap runs, move constant work out of the loop, or leave out
    results that nobody reads; barriers keep it from doing so. The first argument is written anew for every run, so it should
    be small, and the loop itself takes time. Both are measured with a chain without ``run``, and subtracted.

    Args:
        run: any function of arrays; its first call is not timed.
        *args: its arguments; the first is a float array.
        chain: runs per iteration.
        iterations: iterations of the loop.
        repeats: measurements.
    """
    begun = time.perf_counter()
    loop = jax.jit(_loop, static_argnums=(0, 1, 2)).lower(run, chain, iterations, *args).compile()
    jax.block_until_ready(loop(*args))
    compile_seconds = time.perf_counter() - begun
    nothing = (args[0], jnp.zeros((1,), jnp.float32))
    bare = jax.jit(_loop, static_argnums=(0, 1, 2)).lower(_second, chain, iterations, *nothing).compile()
    jax.block_until_ready(bare(*nothing))
    return over(_spans(loop, args, repeats), _spans(bare, nothing, repeats), chain * iterations, compile_seconds)


def _spans(program: Callable[..., Any], args: tuple, repeats: int) -> list[float]:
    """Measure the wall-clock seconds of each of ``repeats`` calls."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - begun)
    return times


def over(whole: list[float], bare: list[float], runs: int, compile_seconds: float) -> Seconds:
    """Compute the seconds per run, from repeats of a loop with ``runs`` runs and from repeats of the same loop without them.

    Among the loops without runs, the fastest counts. Such a loop is so short that a busy host doubles its time, and then the
    runs would seem faster than they are.
    """
    rest = min(bare)
    median, least, most = ((x - rest) / runs for x in (statistics.median(whole), min(whole), max(whole)))
    return Seconds(median=median, least=least, most=most, compile=compile_seconds)


def touch(first: jax.Array, result: Any) -> jax.Array:
    """Return ``first`` unchanged, but available only after all of ``result`` is."""
    odd = jnp.zeros((), bool)
    for leaf in jax.tree.leaves(lax.optimization_barrier(result)):
        # This is never true, but a compiler cannot know that.
        odd = odd | (leaf[(0,) * leaf.ndim].astype(jnp.float32) == 1.2345678e33)
    return first + odd.astype(first.dtype)


def _loop(run: Callable[..., Any], chain: int, iterations: int, *args: Any) -> jax.Array:
    def body(_: jax.Array, first: jax.Array) -> jax.Array:
        for _ in range(chain):
            # All arguments are used below. An unused argument would leave the barrier, and its work could leave the loop.
            first, *others = lax.optimization_barrier((first, *args[1:]))
            first = touch(first, run(first, *others))
        return first

    return lax.fori_loop(0, iterations, body, args[0])


def _second(first: jax.Array, second: jax.Array) -> jax.Array:
    return second
