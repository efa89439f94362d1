"""Implementations that an operation's table does not have on this machine: kernels of one's own, and interpreted kernels."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.speed.kernels.cases import Case
from kvjax.plugins import named_by
from pallas_kernels.dispatch import Implementation, added_implementation


@contextlib.contextmanager
def added(cases: Sequence[Case], paths: Sequence[str], interpret: bool) -> Iterator[None]:
    """Add implementations to the operation of some cases, within this context.

    Args:
        cases: cases of one operation.
        paths: functions ``package.module:function``; each gets the arguments of the operation.
        interpret: whether the kernels of the table run interpreted, on any machine. Their checks of shapes stay.

    Raises:
        ValueError: a path that names no function.
    """
    operation, public = cases[0].operation, cases[0].function
    with contextlib.ExitStack() as stack:
        for name, entry in operation.table.items() if interpret else ():
            if "interpret" in inspect.signature(entry.run).parameters:
                run = functools.partial(entry.run, interpret=True)
                stack.enter_context(added_implementation(operation.name, name, Implementation(run, (), entry.check)))
        for path in paths:
            run = named_by(path, "function")
            if not callable(run):
                raise ValueError(f"--with {path}: expected a function of the arguments of {operation.name}, got {run!r:.60}")
            run, check = _fitted(run, public)
            if interpret and "interpret" in inspect.signature(named_by(path, "function")).parameters:
                run = functools.partial(run, interpret=True)
            stack.enter_context(added_implementation(operation.name, path, Implementation(run, (), check)))
        yield


def _fitted(run: Callable[..., Any], public: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Leave out arguments that a function does not have, where they have the public function's defaults.

    Returns:
        The function with all arguments of the operation; and its check, which refuses other values of those arguments.
    """
    known = inspect.signature(run).parameters
    defaults = {name: parameter.default for name, parameter in inspect.signature(public).parameters.items()}
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())

    def named(args: tuple, given: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(defaults, args, strict=False)) | given  # operations pass their first arguments in the public order

    def check(*args: Any, **given: Any) -> None:
        for name, value in named(args, given).items():
            default = defaults.get(name)
            if not takes_all and name not in known and value is not default and not _equal(value, default):
                raise NotImplementedError(f"it has no argument {name!r}, which this shape needs")

    @functools.wraps(run)
    def fitted(*args: Any, **given: Any) -> Any:
        return run(**{name: value for name, value in named(args, given).items() if takes_all or name in known})

    return fitted, check


def _equal(value: Any, default: Any) -> bool:
    """Compare plain values; an array equals no default."""
    return isinstance(value, (bool, int, float, str, tuple)) and value == default
