"""A job: what a command runs, with the dataclasses whose fields are its flags; how a command ends."""

import argparse
import contextlib
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence

from experiments.cli.programs import CompiledPrograms, Operations
from experiments.cli.settings import parse


class Job:
    """The ``main`` of a command: ``main = Job(run, SpeedSettings, Output)``.

    The help text begins with the docstring of the module that has ``run``. The dataclasses' fields are the flags; a
    dataclass that derives from `Settings` gives the command the flag ``--config``.

    Args:
        run: takes an instance of each of ``kinds``; it returns an exit code, or None for 0.
        *kinds: the dataclasses of the command.
        compiles: whether the command compiles long programs without reporting the compile time. Then the programs are kept
            on disk, and the command has the flags ``--no-cache`` and ``--implementation``.
        models: whether the command runs models. Then it has the flag ``--implementation``.
    """

    def __init__(self, run: Callable[..., int | None], *kinds: type, compiles: bool = False, models: bool = False) -> None:
        self.run, self.kinds = run, kinds
        self.switches = (*[Operations] * (models or compiles), *[CompiledPrograms] * compiles)

    def __call__(self, argv: Sequence[str] | None = None, prog: str | None = None) -> int:
        """Run the command; return the exit code: 0, 2 for bad input, 130 when interrupted, or the job's own.

        ``prog`` is the command as users write it, such as "kvjax eval"; None means ``python -m`` and the module.
        """
        return guarded(lambda: self._start(argv, prog or f"python -m {_module_of(self.run)}"))

    def _start(self, argv: Sequence[str] | None, prog: str) -> int | None:
        about = inspect.cleandoc(sys.modules[self.run.__module__].__doc__ or "").replace("``", "`")
        values = parse((*self.kinds, *self.switches), argv, prog=prog, about=about)
        with contextlib.ExitStack() as stack:
            for switch in values[len(self.kinds) :]:
                stack.enter_context(switch.in_force())
            return self.run(*values[: len(self.kinds)])


def _module_of(run: Callable[..., int | None]) -> str:
    spec = sys.modules["__main__"].__spec__ if run.__module__ == "__main__" else None
    return (spec.name if spec else run.__module__).removesuffix(".__main__")


def guarded(job: Callable[[], int | None]) -> int:
    """Call a job; turn errors that users can cause into one line on standard error and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal in ASCII or Latin-1 must not end an answer
    try:
        code = job()
        print(end="", flush=True)  # standard output may be closed
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except ModuleNotFoundError as error:
        return _say(f"error: {_one_line(error)}", 2)
    except BrokenPipeError:  # the reader went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (
        *(argparse.ArgumentError, ValueError, OSError, MemoryError),
        *(OverflowError, FloatingPointError, NotImplementedError),
    ) as error:
        return _say(f"error: {_one_line(error)}", 2)
    except RuntimeError as error:  # it is the base of JAX's error; this file does not import JAX
        if str(error).startswith("Unable to initialize backend"):  # which JAX_PLATFORMS names
            return _say(f"error: {_one_line(error)}", 2)
        if type(error).__name__ != "JaxRuntimeError" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _say(f"error: the device ran out of memory; use fewer or shorter prompts ({_one_line(error)[:200]})", 2)
    return code or 0


def _one_line(error: BaseException) -> str:
    """Return the error's message in one line, without the number of a system's error."""
    text = re.sub(r"^\[Errno \d+\] ", "", str(error))
    return " ".join(text.split()) or type(error).__name__


def _say(text: str, code: int) -> int:
    print(f"kvjax: {text}", file=sys.stderr, flush=True)
    return code
