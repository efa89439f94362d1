"""The progress of an evaluation: a bar over cells that also moves inside a cell, and says what is done there."""

from __future__ import annotations

import sys
from types import TracebackType

from tqdm import tqdm

from models.progress import progress_bar

# Cells count as floats while they are answered: 4 digits, so that "2.333/8" becomes "8/8" at the end.
_FORMAT = "{l_bar}{bar}| {n:.4g}/{total_fmt} cells [{elapsed}<{remaining}{postfix}]"


class Progress:
    """A bar over the cells of an evaluation; use it in a ``with`` block.

    Args:
        total: number of cells.
        shown: whether anything is shown.
    """

    def __init__(self, total: int, shown: bool) -> None:
        # The mean over all cells predicts the end better than the last cells, some of which have to be compiled.
        self._bar = progress_bar(total=total, unit="cell", smoothing=0, disable=not shown, bar_format=_FORMAT)
        self._done, self._cells, self._name = 0, 0, ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def waits(self) -> None:
        """Say that programs are compiled before the next cells."""
        self._bar.set_description("compiling")

    def begin(self, name: str, cells: int) -> None:
        """Begin cells that are answered together.

        Args:
            name: the methods and the task.
            cells: number of cells; the bar goes back if they were begun before and did not end.
        """
        self._name, self._cells = name, cells
        self.tell("compiling", 0.0)

    def tell(self, phase: str, share: float) -> None:
        """Say what is done now.

        Args:
            phase: "compiling", "reading" (contexts are prefilled) or "asking" (answers are generated).
            share: the part of the cells' work that is done, 0 to 1.
        """
        self._bar.set_description(f"{self._name}: {phase}", refresh=False)
        self._move(self._done + share * self._cells)

    def end(self, cells: int, postfix: str = "") -> None:
        """Count finished cells.

        Args:
            cells: number of cells.
            postfix: text behind the bar; "" leaves the text that is there.
        """
        self._done += cells
        if postfix:
            self._bar.set_postfix_str(postfix, refresh=False)
        self._move(self._done)

    def _move(self, to: float) -> None:
        self._bar.update(to - self._bar.n)
        self._bar.refresh()

    @staticmethod
    def say(line: str) -> None:
        """Show a line above the bar."""
        tqdm.write(line, file=sys.stderr)  # standard output is for results
