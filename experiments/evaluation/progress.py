"""The progress of an evaluation: a bar over cells that also moves inside a cell, and says what is done there.

In a log, where no bar can be drawn, work that takes long is shown by a line now and then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from tqdm import tqdm

from models.hub.progress import progress_bar

# Cells count as floats while they are answered: 4 digits, so that "2.333/8" becomes "8/8" at the end.
_FORMAT = "{l_bar}{bar}| {n:.4g}/{total_fmt} cells [{elapsed}<{remaining}{postfix}]"
_REDRAWN = 5.0  # seconds after which a bar that did not move is drawn again, because its clock moves
_SILENCE = 30.0  # seconds after which a log in which nothing was said gets a line
_WAITS = "compiling"


class Progress:
    """A bar over the cells of an evaluation, or lines of a log; use it in a ``with`` block.

    Args:
        total: number of cells.
        shown: whether anything is shown.
        drawn: whether a bar can be drawn. Where it cannot, a line says what is done whenever nothing was said for a while.
        compiler: describes what the compiler has done, for such a line.
        silence: seconds without a line after which there is one.
    """

    def __init__(
        self, total: int, shown: bool, drawn: bool = True, compiler: Callable[[], str] = str, silence: float = _SILENCE
    ) -> None:
        # The mean over all cells predicts the end better than the last cells, some of which have to be compiled.
        self._bar = progress_bar(total=total, unit="cell", smoothing=0, disable=not (shown and drawn), bar_format=_FORMAT)
        self._drawn, self._compiler, self._every = drawn, compiler, _REDRAWN if drawn else silence
        self._total, self._done, self._cells, self._name = total, 0, 0, ""
        self._doing, self._begun = "preparing", time.monotonic()
        self._since = self._due = self._begun
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="progress", daemon=True) if shown else None

    def __enter__(self) -> Progress:
        self.said()
        if self._beating is not None:
            self._beating.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
        self._bar.close()

    def begin(self, name: str, cells: int) -> None:
        """Begin cells that are answered together; the bar goes back if they were begun before and did not end."""
        self._name, self._cells = name, cells
        self.tell(_WAITS, 0.0)

    def tell(self, phase: str, share: float, what: str = "") -> None:
        """Say what is done now.

        Args:
            phase: "compiling", "reading" (contexts are prefilled) or "asking" (answers are generated).
            share: the part of the cells' work that is done, 0 to 1.
            what: more about the phase, such as how many prompts of how many are read.
        """
        self._doing, self._since = f"{self._name}: {phase} {what}".rstrip(), time.monotonic()
        self._bar.set_description(self._doing, refresh=False)
        self._move(self._done + share * self._cells)

    def end(self, cells: int, postfix: str = "") -> None:
        """Count finished cells; a postfix replaces the text behind the bar."""
        self._done += cells
        if postfix:
            self._bar.set_postfix_str(postfix, refresh=False)
        self._move(self._done)

    def said(self) -> None:
        """Note that a line was just shown: a log needs no other line for a while."""
        self._due = time.monotonic() + self._every

    def _move(self, to: float) -> None:
        self._bar.update(to - self._bar.n)
        self._bar.refresh()

    def _beat(self) -> None:
        """Draw the bar again, or show a line, whenever nothing was shown for long."""
        while not self._ended.wait(max(self._due - time.monotonic(), 0.01)):
            now = time.monotonic()
            if now < self._due:  # a line was shown while this thread waited
                continue
            if self._drawn:
                self._bar.refresh()
            else:
                compiler = self._compiler() if _WAITS in self._doing else ""
                self.say(
                    f"{now - self._begun:7.1f} s  {', '.join(filter(None, (self._doing, compiler)))} "
                    f"(for {now - self._since:.0f} s; {self._done} of {self._total} cells are done)"
                )
            self.said()

    @staticmethod
    def say(line: str) -> None:
        """Show a line above the bar."""
        tqdm.write(line, file=sys.stderr)  # standard output is for results
