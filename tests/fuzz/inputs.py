"""Bad inputs: a case is one value or one file that must be refused by an error of this project, in words."""

from __future__ import annotations

import linecache
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import experiments
import kvjax
import models
import pallas_kernels
from tests.fuzz import arguments, files
from tests.fuzz.report import RAW, SILENT, Outcome
from tests.fuzz.values import shown

_OURS = (
    *(str(pathlib.Path(package.__file__ or "").parent) for package in (kvjax, models, experiments, pallas_kernels)),
    arguments.__file__,  # it refuses what is no bad input after all
)
_SHARES = (0.35, 0.4, 0.25)  # of fields of methods, of arguments of functions, of files


class Inputs:
    """All bad inputs, which share a tiny model, its caches and its files.

    Args:
        seed: of all cases.
        folder: for files; the caller removes it.
    """

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        self.seed, self.folder = seed, folder
        self.world = arguments.World()
        self.fields = arguments.fields_of_methods()
        self.functions = arguments.functions(self.world)
        self.files = files.Files(self.world, folder)

    def check(self, number: int) -> Outcome:
        """The outcome of one case."""
        rng = np.random.default_rng([self.seed, 4, number])
        kind = int(rng.choice(3, p=_SHARES))
        if kind == 2:
            damaged = self.files.damage(rng)
            words = (str(self.folder),)  # the file that is damaged
            return judge(damaged.about, damaged.read, (ValueError, TypeError, OSError), words)
        known = (self.fields, self.functions)[kind]
        argument = known[int(rng.integers(len(known)))]
        value = argument.bad_value(rng)
        about = f"{argument.where} given {shown(value)}"
        words = (argument.name, shown(value).partition(" ")[2])
        return judge(about, lambda: argument.call(value), (ValueError, TypeError), words)


def judge(
    about: str, call: Callable[[], Any], expected: tuple[type[Exception], ...], words: tuple[str, ...]
) -> Outcome:
    """Calls what must fail.

    Args:
        about: the case in words.
        call: returns False if the input did no harm after all, and then that is fine.
        expected: the errors that are fine.
        words: the message has one of these, or speaks of what was got or expected.
    """
    try:
        harmless = call() is False
    except expected as error:
        told = str(error)
        if not _is_ours(error):
            return Outcome(RAW, f"{about}: {type(error).__name__} of {_origin(error)}: {told}")
        if not any(word and word in told for word in ("got", "expected", "unknown", "has no", "exceed", *words)):
            return Outcome(RAW, f"{about}: the message does not say what was given or expected: {told}")
        return Outcome()
    except Exception as error:
        return Outcome(RAW, f"{about}: {type(error).__name__} of {_origin(error)}: {error}")
    return Outcome() if harmless else Outcome(SILENT, f"{about} was accepted")


def _is_ours(error: BaseException) -> bool:
    """Whether a ``raise`` statement of this project made the error. A system's error about a file needs none."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, OSError) and error.filename:
        return True
    return last.filename.startswith(_OURS) and linecache.getline(last.filename, last.lineno or 0).strip().startswith(
        "raise"
    )


def _origin(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{pathlib.Path(last.filename).name}:{last.lineno}"
