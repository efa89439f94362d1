"""One small run of every operation on this device, beside plain JAX on the CPU: what `kvjax doctor` checks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl

from experiments.speed.kernels.cases import Case, small_cases
from experiments.speed.kernels.compare import error, first_wrong
from pallas_kernels.dispatch import XLA, default_implementation, get_default_implementation
from pallas_kernels.machine import assume_machine

# The reference is compiled without LLVM's optimisations, which is faster, and other machine code than that of the device.
_PLAIN = {"xla_backend_optimization_level": 0}


def _mixed(x: jax.Array) -> jax.Array:
    """Return a hash of each of the numbers, uint32."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def _hashed(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return uint32 of a shape: a hash of each place and of ``key`` [1]."""
    place = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return _mixed(_mixed(place * jnp.uint32(0x9E3779B9) + key[0]) + key[0])


# JAX's own random numbers would take most of the time that the references compile.
_HASH = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: _mixed(seed.astype(jnp.uint32)).reshape(1),
    split=lambda key, shape: _hashed(key, (*shape, 1)),
    random_bits=lambda key, width, shape: _hashed(key, shape).astype({8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[width]),
    fold_in=lambda key, data: _mixed(key ^ _mixed(data.astype(jnp.uint32))),
    name="hash of places",
)


@dataclasses.dataclass(frozen=True)
class Check:
    """How an operation did on this device.

    Attributes:
        operation: its name.
        implementation: the first of its table that can run here.
        passed_over: why the earlier ones cannot, by name.
        problem: what is wrong: the first wrong value, or the first line of an error; "" if the result is right.
        failed: whether it is an error.
    """

    operation: str
    implementation: str
    passed_over: dict[str, str]
    problem: str = ""
    failed: bool = False


def check_all(say: Callable[[str], None]) -> Iterator[Check]:
    """Run every operation once, at a small shape, and compare it with the reference.

    An implementation that cannot be compiled, or ends with an error, has a check that says so; the others follow.

    Args:
        say: is told what is going on.
    """
    cases, seed = small_cases(), np.zeros(1, np.uint32)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        say("tracing the references")
        with _reference():
            lowered = jax.jit(functools.partial(_expected, cases)).lower(seed)
        reference = pool.submit(lowered.compile, compiler_options=_PLAIN)
        begun = []
        for case, given in zip(cases, lowered.out_info[0], strict=True):
            say(f"tracing {case.operation.name}")
            begun.append(_begin(case, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)))
        programs = [pool.submit(_compiled, program) for _, program in begun]
        say("compiling the references")
        with _reference():
            arguments, wanted = jax.device_get(reference.result()(seed))
        for case, given, want, (check, _), program in zip(cases, arguments, wanted, begun, programs, strict=True):
            say(f"running {case.operation.name}")
            yield _finish(check, case, given, want, program)


@contextlib.contextmanager
def _reference() -> Iterator[None]:
    """Run plain JAX on the CPU within this context, or on the device where JAX_PLATFORMS leaves the CPU out."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
            stack.enter_context(assume_machine("cpu"))
        stack.enter_context(default_implementation(XLA))
        yield


def _expected(cases: list[Case], seed: jax.Array) -> tuple[list[Any], list[Any]]:
    """Draw the arguments of every case from uint32 [1], and compute its result."""
    key = jax.random.wrap_key_data(seed, impl=_HASH)
    arguments = [case.make(key) for case in cases]
    return arguments, [case.reference(*given) for case, given in zip(cases, arguments, strict=True)]


def _begin(case: Case, given: Any) -> tuple[Check, Any]:
    """Choose the implementation, and trace it; an error is returned in place of the program."""
    asked = get_default_implementation()
    passed_over: dict[str, str] = {}
    for name in [asked] if asked else case.operation.table:
        check = Check(case.operation.name, name, passed_over)
        try:
            run = functools.partial(case.run, implementation=name)
            return check, jax.jit(lambda *given, run=run: case.defined(run(*given))).lower(*given)
        except NotImplementedError as reason:
            passed_over[name] = str(reason).rpartition("cannot run: ")[2].partition(" (got platform")[0]
        except Exception as problem:  # the kernel cannot even be traced
            return check, problem
    raise AssertionError(f"{case.operation.name}: plain JAX runs everywhere")


def _compiled(lowered: Any) -> Any:
    if isinstance(lowered, Exception):
        raise lowered
    return lowered.compile()


def _finish(check: Check, case: Case, given: Any, want: Any, program: concurrent.futures.Future) -> Check:
    try:
        got = jax.device_get(program.result()(*jax.device_put(given)))
    except Exception as problem:  # the other operations are still wanted
        line = next(iter(str(problem).strip().splitlines()), "")
        return dataclasses.replace(check, problem=f"{type(problem).__name__}: {line}", failed=True)
    if error(got, want) <= case.shape.timed.tolerance:
        return check
    return dataclasses.replace(check, problem=first_wrong(got, want, case.shape.timed.tolerance) or "values differ")
