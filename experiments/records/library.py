"""Rows whose texts come from Python's standard library: rows of two versions are not compared."""

from collections.abc import Iterable, Mapping
from typing import Any

LIBRARY_FIELD = "library"  # of a row: what `experiments.tasks.library_origin` returned where the row was measured


def library_text(origin: Mapping[str, Any]) -> str:
    """Describe an origin for people."""
    return f"Python {origin.get('python')} ({origin.get('files')} files, sha256 {str(origin.get('sha256'))[:12]})"


def check_library(rows: Iterable[Mapping[str, Any]], where: str, mine: Mapping[str, Any] | None = None) -> None:
    """Refuse rows whose texts come from the standard libraries of two versions of Python, or of another one than ``mine``.

    ``where`` names the folder or the folders in the message.
    """
    for row in rows:
        if (origin := row.get(LIBRARY_FIELD)) is None:
            continue
        mine = mine or origin
        if origin != mine:
            raise ValueError(
                f"{where}: rows of tasks of code are compared only if their files are the same, got the standard libraries "
                f"of {library_text(origin)} and {library_text(mine)}"
            )
