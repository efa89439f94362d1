"""The verdict on a case: what must fail fails in words of this project, and what must work gives the right value."""

from __future__ import annotations

import linecache
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import experiments
import kvjax
import models
import pallas_kernels
from tests.fuzz import arguments
from tests.fuzz.report import RAW, SILENT, WRONG, Outcome

REFUSALS = (ValueError, TypeError, OSError)
_OURS = (
    *(str(pathlib.Path(package.__file__ or "").parent) for package in (kvjax, models, experiments, pallas_kernels)),
    arguments.__file__,  # it refuses what is no bad input after all
)
_TELLS = ("got", "expected", "unknown", "has no", "exceed")


def judge(
    about: str, call: Callable[[], Any], expected: tuple[type[Exception], ...], words: tuple[str, ...]
) -> Outcome:
    """Call what must fail.

    Args:
        about: the case in words.
        call: returns False if the input did no harm after all, and then that is fine.
        expected: the errors that are fine.
        words: the message has one of these, or speaks of what was got or expected.
    """
    try:
        harmless = call() is False
    except Exception as error:
        return _refused(about, error, expected, lambda told: any(word and word in told for word in (*_TELLS, *words)))
    return Outcome() if harmless else Outcome(SILENT, f"{about} was accepted")


def verify(
    about: str,
    call: Callable[[], Any],
    *,
    right: Callable[[Any], str | None] | None,
    named: str | None,
    expected: tuple[type[Exception], ...] = REFUSALS,
) -> Outcome:
    """Call what must give the right value, or may or must be refused.

    Args:
        about: the case in words.
        call: gives a value.
        right: None for a right value, else what is wrong with it, in words; None if every value is wrong.
        named: a refusal is fine if its message has this text; None if a refusal is not fine.
        expected: the errors that are refusals.
    """
    try:
        value = call()
    except Exception as error:
        if named is None:
            return Outcome(WRONG, f"{about}: refused, though it is right: {type(error).__name__}: {error}")
        return _refused(about, error, expected, lambda told: named in told)
    if right is None:
        return Outcome(SILENT, f"{about} was accepted and gave {value!r:.200}")
    wrong = right(value)
    return Outcome() if wrong is None else Outcome(WRONG, f"{about}: {wrong}")


def _refused(about: str, error: Exception, expected: tuple[type[Exception], ...], tells: Callable[[str], bool]) -> Outcome:
    told = str(error)
    if not isinstance(error, expected) or not _is_ours(error):
        return Outcome(RAW, f"{about}: {type(error).__name__} of {_origin(error)}: {told}")
    if not tells(told):
        return Outcome(RAW, f"{about}: the message does not say what was given or expected: {told}")
    return Outcome()


def _is_ours(error: BaseException) -> bool:
    """Tell whether a ``raise`` statement of this project made the error. A system's error about a file needs none."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, OSError) and error.filename:
        return True
    return last.filename.startswith(_OURS) and linecache.getline(last.filename, last.lineno or 0).strip().startswith(
        "raise"
    )


def _origin(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{pathlib.Path(last.filename).name}:{last.lineno}"
