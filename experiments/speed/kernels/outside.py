"""Implementations that an operation's table does not have on this machine: kernels of one's own, and interpreted kernels."""

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
    operation = cases[0].operation
    with contextlib.ExitStack() as stack:
        for name, entry in operation.table.items() if interpret else ():
            if _interprets(entry.run):
                run = functools.partial(entry.run, interpret=True)
                stack.enter_context(added_implementation(operation.name, name, Implementation(run, (), entry.check)))
        for path in paths:
            run = named_by(path, "function")
            if not callable(run):
                raise ValueError(f"--with {path}: expected a function of the arguments of {operation.name}, got {run!r:.60}")
            run = functools.partial(run, interpret=True) if interpret and _interprets(run) else run
            stack.enter_context(added_implementation(operation.name, path, Implementation(run, ())))
        yield


def _interprets(run: Callable[..., Any]) -> bool:
    return "interpret" in inspect.signature(run).parameters
