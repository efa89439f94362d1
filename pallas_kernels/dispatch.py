"""Choose and run one of several implementations of an operation.

A caller that names no implementation always gets a result: names are tried in the order of the table, whose last name is
``"xla"``. A caller that names an implementation gets it or an error, never a silent substitute. Experiments record what
``Operation.resolve`` returns, because a measurement means nothing without the implementation that it was made with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax

from pallas_kernels import operations
from pallas_kernels.machine import (
    KERNELS_FROM,
    PALLAS,
    PALLAS_MOSAIC_GPU,
    PALLAS_TPU,
    PALLAS_TRITON,
    Machine,
    current_machine,
    say_once,
    why_missing,
)
from pallas_kernels.soft_cap import get_soft_cap

XLA = "xla"  # the name of plain JAX in every table

# The module of JAX without which the implementations of a name do not run. The language of "jax_triton" is not of JAX.
_NEEDS = {
    "pallas_triton": PALLAS_TRITON,
    "jax_triton": PALLAS,
    "pallas_mosaic_gpu": PALLAS_MOSAIC_GPU,
    "pallas_tpu": PALLAS_TPU,
}

# The platforms of each back end, which is a file of this name in an operation's folder; `reference` runs everywhere.
BACK_ENDS = {
    "pallas_triton": ("gpu",),
    "jax_triton": ("gpu",),
    "pallas_mosaic_gpu": ("gpu",),
    "cudnn": ("gpu",),
    "pallas_tpu": ("tpu",),
}

# A value of this kind is part of the key of every trace and program that JAX keeps.
_DEFAULT = jax.make_user_context(None)
_ADDED = jax.make_user_context(())  # of (operation, name, implementation)


@contextlib.contextmanager
def default_implementation(name: str | None) -> Iterator[None]:
    """Set the implementation of every operation that is called without one, within this context and this thread.

    With "xla" everything runs as plain JAX, whatever the method and the device. It serves to find out whether a kernel is at
    fault, or to run where a driver supports none. An ``implementation`` that is given to a method or to an operation
    overrides this setting. JAX's compilation caches distinguish the setting, as they do ``jax.default_matmul_precision``: a
    program that was compiled outside of the context is compiled anew inside.

    Args:
        name: "xla", or None for the fastest implementation that runs, as without the context.

    Raises:
        ValueError: the name is neither "xla" nor None.
    """
    with _DEFAULT(_checked(name)):
        yield


def set_default_implementation(name: str | None) -> None:
    """Set what `default_implementation` sets, from now on and in all threads; a context still overrides it."""
    _DEFAULT.set_global(_checked(name))


def get_default_implementation() -> str | None:
    """Return what `default_implementation` or `set_default_implementation` has set here: "xla", or None."""
    return _DEFAULT.value


def _checked(name: str | None) -> str | None:
    if name not in (None, XLA):
        raise ValueError(f"default implementation: got {name!r}, expected {XLA!r} or None, for the fastest that runs")
    return name


def accept(*args: Any, **kwargs: Any) -> None:
    """Accept all arguments: the check of an implementation that has no limits."""


def nowhere(*args: Any, **kwargs: Any) -> bool:
    """Keep an implementation's place in its operation's order."""
    return False


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        run: the function; it takes the arguments of the operation.
        platforms: the platforms that it runs on, named as in ``jax.default_backend()``; empty means all. "gpu" means an
            NVIDIA GPU that kernels run on (`pallas_kernels.machine`).
        check: a function of the same arguments that reads only shapes and dtypes. Where ``run`` cannot take them, it raises
            ``NotImplementedError`` that names got and expected.
        derivative: whether ``run`` has one; it is asked of kernels alone.
        takes: what ``check`` lets pass, for the operation's docstring, or "" where that says so itself.
        first: a function like ``check`` to whether this one comes before those that stand before it.
    """

    run: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    check: Callable[..., None] = accept
    derivative: bool = False
    takes: str = ""
    first: Callable[..., bool] = nowhere


@contextlib.contextmanager
def added_implementation(operation: str, name: str, implementation: Implementation) -> Iterator[None]:
    """Add an implementation to an operation's table, within this context and this thread: a kernel of your own, for example.

    It comes first, so calls that name no implementation take it where it can run, inside methods too. An implementation of
    the same name is replaced. Programs that JAX has traced outside of the context are not used inside.

    Args:
        operation: the operation's name, such as "gather_attention".
        name: the implementation's name.
        implementation: gets every argument of the operation.

    Raises:
        ValueError: there is no such operation.
    """
    if operation not in (known := sorted(name for _, name in operations())):
        near = difflib.get_close_matches(operation, known, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown operation {operation!r}, did you mean {near!r}? expected one of {', '.join(known)}")
    with _ADDED((*_ADDED.value, (operation, name, implementation))):
        yield


def run_shared(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run(*args, **kwargs)``; inside a trace, equal calls are traced and lowered once.

    All layers of a model call the same kernels, and layers of equal methods call the same hooks. Tracing and lowering each of
    them again would take most of the time that Python needs for a program of 30 layers. XLA puts the shared function back in
    the place of its calls.

    Args:
        run: the function.
        *args: pytrees. Leaves that are no arrays are static.
        **kwargs: pytrees, too.
    """
    arrays, call = _Call.of(run, args, kwargs)
    tracing = any(isinstance(array, jax.core.Tracer) for array in arrays)
    if not tracing or any(array.aval.memory_space == jax.memory.Space.Host for array in arrays):
        return run(*args, **kwargs)  # XLA places arrays in host memory best where it sees all that is done with them
    return _traced_once(arrays, call=call)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call without its arrays, hashable.

    Attributes:
        run: the function.
        structure: the pytree structure of its arguments.
        fixed: type and value of each leaf of the arguments; None for an array.
    """

    run: Callable[..., Any]
    structure: Any
    fixed: tuple[tuple[type, Any] | None, ...]

    @classmethod
    def of(cls, run: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> tuple[list[jax.Array], _Call]:
        """Take the arrays out of a call."""
        leaves, structure = jax.tree.flatten((args, kwargs))
        # Equal numbers of several types, such as 1 and True, are several calls.
        fixed = tuple(None if isinstance(leaf, jax.Array) else (type(leaf), leaf) for leaf in leaves)
        return [leaf for leaf in leaves if isinstance(leaf, jax.Array)], cls(run, structure, fixed)

    def arguments(self, arrays: list[jax.Array]) -> tuple[tuple, dict[str, Any]]:
        """Put ``arrays`` in their places, and return the positional and the named arguments."""
        rest = iter(arrays)
        leaves = [next(rest) if entry is None else entry[1] for entry in self.fixed]
        return jax.tree.unflatten(self.structure, leaves)


@functools.partial(jax.jit, static_argnames="call")
def _traced_once(arrays: list[jax.Array], *, call: _Call) -> Any:
    args, kwargs = call.arguments(arrays)
    return call.run(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A call of a kernel that says that it has no derivative, where JAX would fail inside of the kernel.

    Attributes:
        operation: the name of the operation.
        name: the name of the implementation.
        run: as in `Implementation`.
    """

    operation: str
    name: str
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arrays, call = _Call.of(self.run, args, kwargs)

        @jax.custom_jvp
        def run(arrays: list[jax.Array]) -> Any:
            args, kwargs = call.arguments(arrays)
            return call.run(*args, **kwargs)

        @run.defjvp
        def refuse(primals: Any, tangents: Any) -> Any:
            raise NotImplementedError(
                f"{self.operation}: the kernel {self.name!r} has no derivative: differentiate plain JAX, within "
                f"default_implementation({XLA!r})"
            )

        return run(arrays)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and its implementations, fastest first; the last one runs everywhere."""

    name: str
    implementations: Mapping[str, Implementation]
    logits: bool = False  # True: it computes logits of attention, which only plain JAX does under a `soft_cap`
    in_place: bool = False  # True: it writes into its arguments where they are donated

    @classmethod
    def of(cls, name: str, *modules: ModuleType, logits: bool = False, in_place: bool = False) -> Operation:
        """Make an operation of the files in its folder, fastest first, of which the last is its ``reference``.

        A file has a function of the operation's name, and a back end's has a function ``check``, ``TAKES``, which says what
        that lets pass, ``DERIVATIVE = True`` if it is a kernel with a derivative, and a function ``first`` if it is faster
        than those before it for some sizes. The table names it as the file, and the reference "xla".
        """
        *kernels, reference = modules
        names = {module.__name__.rpartition(".")[2]: module for module in kernels}
        rows = {
            end: Implementation(
                getattr(x, name),
                BACK_ENDS[end],
                x.check,
                getattr(x, "DERIVATIVE", False),
                getattr(x, "TAKES", ""),
                getattr(x, "first", nowhere),
            )
            for end, x in names.items()
        }
        return cls(name, {**rows, XLA: Implementation(getattr(reference, name))}, logits, in_place)

    @property
    def table(self) -> dict[str, Implementation]:
        """The implementations by name: what `added_implementation` has added here, the newest first, and then its own."""
        added: dict[str, Implementation] = {}
        for operation, name, entry in reversed(_ADDED.value):
            if operation == self.name:
                added.setdefault(name, entry)
        return {**added, **{name: entry for name, entry in self.implementations.items() if name not in added}}

    def resolve(self, *args: Any, implementation: str | None = None, platform: str | None = None, **kwargs: Any) -> str:
        """Return the name that ``run`` would use, or raise as ``run`` does; arguments may be ``jax.ShapeDtypeStruct``."""
        return self._first(implementation, platform, lambda entry: None, args, kwargs)[0]

    def run(self, *args: Any, implementation: str | None = None, platform: str | None = None, **kwargs: Any) -> Any:
        """Run the named implementation, or the first that can.

        Args:
            *args: positional arguments of the operation.
            implementation: a name in the table; under "xla" the operations that its code calls are plain JAX, too. None
                takes the name that `default_implementation` sets, or else the first that runs.
            platform: "cpu", "gpu" or "tpu"; None takes the machine of `assume_machine`, or else the devices of this process,
                when the call is traced. "gpu" stands for any GPU that kernels run on.
            **kwargs: keyword arguments of the operation.

        Raises:
            ValueError: the name is not in the table.
            NotImplementedError: the named implementation cannot run on this machine, shape or dtype.
            ExceptionGroup: no name was given and no implementation could run; it holds a ``NotImplementedError`` per name.
        """

        def action(entry: Implementation) -> Any:
            # The platforms of plain JAX are not named. It is traced fast, and stays in the text of the program that calls it.
            if not entry.platforms:
                with default_implementation(XLA) if implementation == XLA else contextlib.nullcontext():
                    out = entry.run(*args, **kwargs)
                # On a CPU, XLA would fuse a write into what reads the array next, and then write a second time, into a copy.
                return jax.lax.optimization_barrier(out) if self.in_place else out
            names = [name for name, other in self.implementations.items() if other is entry and name in _NEEDS]
            kernels = [] if entry.derivative else names
            return run_shared(_Kernel(self.name, kernels[0], entry.run) if kernels else entry.run, *args, **kwargs)

        return self._first(implementation, platform, action, args, kwargs)[1]

    def _first(self, implementation, platform, action, args, kwargs) -> tuple[str, Any]:
        table = self.table
        if implementation is not None and implementation not in table:
            raise ValueError(f"{self.name}: {implementation=} is unknown, expected one of {list(table)}")
        here = current_machine() if platform is None else Machine(platform, KERNELS_FROM if platform == "gpu" else None)
        named = implementation or get_default_implementation()
        if named is None:
            _say_where_kernels_are(here)
        errors = []

        def later(name: str) -> bool:  # what `added_implementation` has added stays first
            return table[name] is self.implementations.get(name) and not table[name].first(*args, **kwargs)

        for name in sorted(table, key=later) if named is None else (named,):
            entry = table[name]
            try:
                if entry.platforms and here.platform not in entry.platforms:
                    raise NotImplementedError(f"needs a platform in {entry.platforms}")
                if entry.platforms and here.platform == "gpu" and not here.has_kernels:
                    raise NotImplementedError(f"needs {_KERNELS_NEED}, got {here}")
                if name in _NEEDS and (why := why_missing(_NEEDS[name])):
                    raise NotImplementedError(f"needs {_NEEDS[name]}, got {why}")
                if self.logits and entry.platforms and (cap := get_soft_cap()) is not None:
                    say_once(f"attention with a soft cap on its logits runs as plain JAX (implementation {XLA!r})")
                    raise NotImplementedError(f"needs logits without a soft cap, got a cap of {cap}")
                entry.check(*args, **kwargs)
                return name, action(entry)
            except NotImplementedError as error:
                message = f"{self.name}: {name!r} cannot run: {error} (got platform={here.platform!r})"
                errors.append(NotImplementedError(message))
                if named is not None:
                    raise errors[0] from error
        raise ExceptionGroup(f"{self.name}: no implementation can run on platform={here.platform!r}", errors)


_KERNELS_NEED = "an NVIDIA GPU of compute capability {}.{} or above".format(*KERNELS_FROM)


def _say_where_kernels_are(here: Machine) -> None:
    """Tell the user of an accelerator what runs as plain JAX there, and any user which modules JAX lacks."""
    lacking = {"gpu": (PALLAS_TRITON,), "tpu": (PALLAS_TPU,)}.get(here.platform, (PALLAS_TRITON, PALLAS_TPU))
    if lacks := [f"{module} ({why})" for module in lacking if (why := why_missing(module))]:
        missing = " and no ".join(lacks)
        say_once(f"operations without another kernel run as plain JAX (implementation {XLA!r}): this JAX has no {missing}")
    elif here.platform == "tpu":
        say_once(f"operations without a kernel for TPUs run as plain JAX (implementation {XLA!r})")
    elif here.platform != "cpu" and not here.has_kernels:
        say_once(f"all operations run as plain JAX (implementation {XLA!r}): kernels need {_KERNELS_NEED}, got {here}")
