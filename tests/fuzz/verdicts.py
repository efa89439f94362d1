"""The verdict on a case: what must fail fails in a sentence of this project, and what must work gives the right value."""

import linecache
import pathlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import experiments
import kvjax
import models
import pallas_kernels

REFUSALS = (ValueError, TypeError, OSError)
_OURS = tuple(str(pathlib.Path(package.__file__ or "").parent) for package in (kvjax, models, experiments, pallas_kernels))


class Broken(AssertionError):
    """A law that a case breaks, as a text that begins with the verdict.

    "wrong": a law does not hold, or a right input was refused or misread; "silent": a bad input was accepted; "raw": an error
    that this project did not raise, or whose message does not say what was wrong.
    """


def judge(
    about: str,
    call: Callable[[], Any],
    *,
    right: Callable[[Any], str | None] | None = None,
    named: Sequence[str] = (),
    errors: tuple[type[Exception], ...] = REFUSALS,
) -> None:
    """Call what must give a right value, or may or must be refused.

    Args:
        about: the case in words.
        call: gives a value.
        right: None for a right value, else what is wrong with it, in words. Without it every value is wrong.
        named: a refusal is fine if its message has one of these texts, in capitals or not; without any, no refusal is fine.
        errors: the errors that are refusals.

    Raises:
        Broken: the verdict, unless all is fine.
    """
    try:
        value = call()
    except Exception as error:
        message, origin = str(error), traceback.extract_tb(error.__traceback__)[-1]
        if not named:
            raise Broken(f"wrong: {about}: refused, though it is right: {type(error).__name__}: {message}") from error
        if not isinstance(error, errors) or not _is_ours(error, origin):
            where = f"{pathlib.Path(origin.filename).name}:{origin.lineno}"
            raise Broken(f"raw: {about}: {type(error).__name__} of {where}: {message}") from error
        if not any(text.lower() in message.lower() for text in named):
            raise Broken(f"raw: {about}: the message does not say what was wrong: {message}") from error
        return
    if right is None:
        raise Broken(f"silent: {about} was accepted and gave {value!r:.200}")
    if (fault := right(value)) is not None:
        raise Broken(f"wrong: {about}: {fault}")


def _is_ours(error: BaseException, origin: traceback.FrameSummary) -> bool:
    """Tell whether a ``raise`` statement of this project made the error. A system's error about a file needs none."""
    if isinstance(error, OSError) and error.filename:
        return True
    line = linecache.getline(origin.filename, origin.lineno or 0)
    return origin.filename.startswith(_OURS) and line.strip().startswith("raise")
