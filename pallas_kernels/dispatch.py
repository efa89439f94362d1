"""Choose and run one of several implementations of an operation.

A caller that names no implementation always gets a result: names are tried in the order of the table, whose last name is
``"xla"``. A caller that names an implementation gets it or an error, never a silent substitute. Experiments record what
``Operation.resolve`` returns, because a measurement means nothing without the implementation that it was made with.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

_ASSUMED: contextvars.ContextVar[str | None] = contextvars.ContextVar("assumed_platform", default=None)


@contextlib.contextmanager
def assume_platform(platform: str) -> Iterator[None]:
    """Within this context, calls that name no platform choose as they would on ``platform``.

    It serves to compile ahead of time for an accelerator that this process does not have, where ``jax.default_backend()`` is
    not the platform that the program will run on. JAX keeps traces, so trace only functions that were not traced before, or
    clear its caches.

    Args:
        platform: "cpu", "gpu" or "tpu".
    """
    token = _ASSUMED.set(platform)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


def accept(*args: Any, **kwargs: Any) -> None:
    """The check of an implementation that takes all arguments."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
        run: the function; it takes the arguments of the operation.
        platforms: the platforms that it runs on, named as in ``jax.default_backend()``; empty means all.
        check: a function of the same arguments that reads only shapes and dtypes. Where ``run`` cannot take them, it raises
            ``NotImplementedError`` that names got and expected.
    """

    run: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    check: Callable[..., None] = accept


def _run(run: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    return run(*args, **kwargs)


def _run_shared(run: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """``run(*args, **kwargs)``; inside a trace, equal calls are traced and lowered once.

    All layers of a model call the same kernels. To trace and lower them once for each layer took most of the time that Python
    needs for a program of 30 layers. XLA puts the shared function back in the place of its calls.
    """
    leaves, structure = jax.tree.flatten((args, dict(kwargs)))
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    tracing = any(isinstance(array, jax.core.Tracer) for array in arrays)
    if not tracing or any(array.aval.memory_space == jax.memory.Space.Host for array in arrays):
        return run(*args, **kwargs)  # XLA places arrays in host memory best where it sees all that is done with them
    # Equal numbers of several types, such as 1 and True, are several calls.
    fixed = tuple(None if isinstance(leaf, jax.Array) else (type(leaf), leaf) for leaf in leaves)
    return _traced_once(arrays, call=_Call(run, structure, fixed, _ASSUMED.get()))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call without its arrays.

    Attributes:
        run: the function.
        structure: of its arguments.
        fixed: type and value of each leaf of the arguments; None for an array.
        platform: what `assume_platform` says.
    """

    run: Callable[..., Any]
    structure: Any
    fixed: tuple[tuple[type, Any] | None, ...]
    platform: str | None

    def __call__(self, arrays: Iterator[jax.Array]) -> Any:
        leaves = [next(arrays) if entry is None else entry[1] for entry in self.fixed]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return self.run(*args, **kwargs)


@functools.partial(jax.jit, static_argnames="call")
def _traced_once(arrays: list[jax.Array], *, call: _Call) -> Any:
    return call(iter(arrays))


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation and its implementations, fastest first; the last one runs everywhere."""

    name: str
    implementations: Mapping[str, Implementation]

    def resolve(self, *args: Any, implementation: str | None = None, platform: str | None = None, **kwargs: Any) -> str:
        """The name that ``run`` would use. Arguments may be ``jax.ShapeDtypeStruct``; errors are those of ``run``."""
        return self._first(implementation, platform, lambda entry: None, args, kwargs)[0]

    def run(self, *args: Any, implementation: str | None = None, platform: str | None = None, **kwargs: Any) -> Any:
        """Run the named implementation, or the first that can.

        Args:
            *args: positional arguments of the operation.
            implementation: a name in the table, or None for the first that runs.
            platform: "cpu", "gpu" or "tpu"; None takes the platform of `assume_platform`, or else that of
                ``jax.default_backend()``, when the call is traced.
            **kwargs: keyword arguments of the operation.

        Raises:
            ValueError: the name is not in the table.
            NotImplementedError: the named implementation cannot run on this platform, shape or dtype.
            ExceptionGroup: no name was given and no implementation could run; it holds a ``NotImplementedError`` per name.
        """

        def action(entry: Implementation) -> Any:
            # The platforms of plain JAX are not named. It is traced fast, and stays in the text of the program that calls it.
            return (_run_shared if entry.platforms else _run)(entry.run, args, kwargs)

        return self._first(implementation, platform, action, args, kwargs)[1]

    def _first(self, implementation, platform, action, args, kwargs) -> tuple[str, Any]:
        if implementation is not None and implementation not in self.implementations:
            raise ValueError(f"{self.name}: {implementation=} is unknown, expected one of {list(self.implementations)}")
        platform = platform or _ASSUMED.get() or jax.default_backend()
        errors = []
        for name in self.implementations if implementation is None else (implementation,):
            entry = self.implementations[name]
            try:
                if entry.platforms and platform not in entry.platforms:
                    raise NotImplementedError(f"needs a platform in {entry.platforms}")
                entry.check(*args, **kwargs)
                return name, action(entry)
            except NotImplementedError as error:
                message = f"{self.name}: {name!r} cannot run: {error} (got {platform=})"
                errors.append(NotImplementedError(message))
                if implementation is not None:
                    raise errors[0] from error
        raise ExceptionGroup(f"{self.name}: no implementation can run on {platform=}", errors)
