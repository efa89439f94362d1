"""One small run of every operation on this device, beside plain JAX on the CPU: what `kvjax doctor` checks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments.speed.kernels.cases import Case, small_cases
from experiments.speed.kernels.compare import error, first_wrong
from pallas_kernels.dispatch import XLA, default_implementation, get_default_implementation
from pallas_kernels.machine import assume_machine

# The reference is compiled without LLVM's optimisations, which is faster, and other machine code than that of the device.
_PLAIN = {"xla_backend_optimization_level": 0}


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
    cases = small_cases()
    say("computing what is expected")
    arguments, wanted = expected(cases)
    say("tracing")
    begun = [_begin(case, jax.device_put(given)) for case, given in zip(cases, arguments, strict=True)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = [pool.submit(_compiled, lowered) for _, lowered in begun]
        for case, given, want, (check, _), program in zip(cases, arguments, wanted, begun, programs, strict=True):
            say(case.operation.name)
            yield _finish(check, case, given, want, program)


def expected(cases: list[Case]) -> tuple[list[Any], list[Any]]:
    """Draw the arguments of every case, and compute its result as plain JAX, in one program on the CPU if there is one."""

    def compute(key: jax.Array) -> tuple[list[Any], list[Any]]:
        arguments = [case.make(key) for case in cases]
        return arguments, [case.reference(*given) for case, given in zip(cases, arguments, strict=True)]

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave the CPU out
            stack.enter_context(jax.default_device(jax.local_devices(backend="cpu")[0]))
            stack.enter_context(assume_machine("cpu"))
        stack.enter_context(default_implementation(XLA))
        key = jax.random.key(0, impl="unsafe_rbg")  # whose numbers need few instructions
        return jax.device_get(jax.jit(compute).lower(key).compile(compiler_options=_PLAIN)(key))


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
