"""One small run of every operation on this device, beside plain JAX on the CPU: what `kvjax doctor` checks."""

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

from experiments.speed.kernels.cases import Case, small_cases
from experiments.speed.kernels.compare import error, first_wrong
from pallas_kernels.dispatch import XLA, default_implementation, get_default_implementation
from pallas_kernels.machine import assume_machine

# The reference is compiled without LLVM's optimisations, which is faster, and other machine code than that of the device.
_NUMBERS = 1 << 20  # drawn of each kind
_PLAIN = {"xla_backend_optimization_level": 0}


def first_line(problem: Exception) -> str:
    """Return the kind of an error and the first line of its message."""
    return f"{type(problem).__name__}: {next(iter(str(problem).strip().splitlines()), '')}"


class _Drawn:
    """The functions of `jax.random` that draw arguments, which take the next of numbers that NumPy has drawn.

    JAX's own functions would take most of the time in which the references compile. Keys mean nothing here.
    """

    def __init__(self, normals: jax.Array, words: jax.Array) -> None:
        self.normals, self.words, self.at = normals, words, 0

    def _next(self, numbers: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        size = math.prod(shape)
        first = self.at % max(len(numbers) - size, 1)
        self.at += size
        return numbers[first : first + size].reshape(shape) if size <= len(numbers) else jnp.resize(numbers, shape)

    def key(self, seed: int) -> jax.Array:
        return self.split(None, 1)[0]

    def split(self, key: Any, count: int = 2) -> jax.Array:
        return jnp.zeros((count,), jnp.uint32)

    def normal(self, key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
        return self._next(self.normals, shape).astype(dtype)

    def bits(self, key: Any, shape: tuple[int, ...], dtype: Any = jnp.uint32) -> jax.Array:
        return self._next(self.words, shape).astype(dtype)

    def randint(self, key: Any, shape: tuple[int, ...], minval: int, maxval: int, dtype: Any = jnp.int32) -> jax.Array:
        low = (self.bits(key, shape) % jnp.uint32(maxval - minval)).astype(jnp.int32)
        return (low + minval).astype(dtype)

    def uniform(
        self, key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, minval: float = 0, maxval: float = 1
    ) -> Any:
        return (self.randint(key, shape, 0, 1 << 20).astype(jnp.float32) * ((maxval - minval) / (1 << 20)) + minval).astype(
            dtype
        )

    def rademacher(self, key: Any, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.Array:
        return (2 * self.randint(key, shape, 0, 2) - 1).astype(dtype)

    def choice(self, key: Any, a: int, shape: tuple[int, ...], replace: bool) -> jax.Array:
        """Choose a number out of each of as many equal parts as are asked for, so that all differ."""
        part = a // shape[0]
        return part * jnp.arange(shape[0], dtype=jnp.int32) + self.randint(key, shape, 0, part)


@dataclasses.dataclass(frozen=True)
class Check:
    """How an implementation of an operation did on this device.

    Attributes:
        operation: its name.
        implementation: the implementation's name.
        passed_over: why others of the operation cannot run here, by name.
        problem: what is wrong: the first wrong value, or the first line of an error; "" if the result is right.
        failed: whether it is an error.
    """

    operation: str
    implementation: str
    passed_over: dict[str, str]
    problem: str = ""
    failed: bool = False


def check_all(say: Callable[[str], None]) -> Iterator[Check]:
    """Run all kernels of every operation that can run here, or else plain JAX, at a small shape, beside the reference.

    An implementation that cannot be compiled, or ends with an error, has a check that says so; the others follow.

    Args:
        say: is told what is going on.
    """
    cases, source = small_cases(), np.random.default_rng(0)
    numbers = source.standard_normal(_NUMBERS, np.float32), source.integers(0, 1 << 32, _NUMBERS, np.uint32)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        say("tracing the references")
        with _reference():
            lowered = jax.jit(functools.partial(_expected, cases)).lower(*numbers)
        reference = pool.submit(lowered.compile, compiler_options=_PLAIN)
        begun = []
        for case, given in zip(cases, lowered.out_info[0], strict=True):
            say(f"tracing {case.operation.name}")
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
            begun.append([(check, pool.submit(_compiled, program)) for check, program in _begin(case, shapes)])
        say("compiling the references")
        with _reference():
            arguments, wanted = jax.device_get(reference.result()(*numbers))
        for case, given, want, checks in zip(cases, arguments, wanted, begun, strict=True):
            say(f"running {case.operation.name}")
            for check, program in checks:
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


def _expected(cases: list[Case], normals: jax.Array, words: jax.Array) -> tuple[list[Any], list[Any]]:
    """Draw the arguments of every case, and compute its result."""
    drawn = _Drawn(normals, words)
    arguments = [case.make(drawn) for case in cases]
    return arguments, [case.reference(*given) for case, given in zip(cases, arguments, strict=True)]


def _begin(case: Case, given: Any) -> Iterator[tuple[Check, Any]]:
    """Trace the kernels that can run, or else plain JAX; an error is returned in place of a program."""
    asked, found = get_default_implementation(), False
    passed_over: dict[str, str] = {}
    for name in [asked] if asked else case.operation.table:
        if found and name == XLA:
            return
        check = Check(case.operation.name, name, passed_over)
        try:
            run = functools.partial(case.run, implementation=name)
            yield check, jax.jit(lambda *given, run=run: case.defined(run(*given))).lower(*given)
        except NotImplementedError as reason:
            passed_over[name] = str(reason).rpartition("cannot run: ")[2].partition(" (got platform")[0]
            continue
        except Exception as problem:  # the kernel cannot even be traced
            yield check, problem
        found = True


def _compiled(lowered: Any) -> Any:
    if isinstance(lowered, Exception):
        raise lowered
    return lowered.compile()


def _finish(check: Check, case: Case, given: Any, want: Any, program: concurrent.futures.Future) -> Check:
    try:
        got = jax.device_get(program.result()(*jax.device_put(given)))
    except Exception as problem:  # the other operations are still wanted
        return dataclasses.replace(check, problem=first_line(problem), failed=True)
    if error(got, want) <= case.shape.timed.tolerance:
        return check
    return dataclasses.replace(check, problem=first_wrong(got, want, case.shape.timed.tolerance) or "values differ")
