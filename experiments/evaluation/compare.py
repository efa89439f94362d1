"""``kvjax compare``: the methods of result folders against Full, example by example."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from experiments.cli import option, run
from experiments.evaluation.tables import report
from experiments.records import write_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareCommand:
    """What to compare.

    Attributes:
        folders: result folders of eval or sweep
        papers: also show the scores that papers print for the same model and tasks
        out: Markdown file to write (default: standard output)
    """

    folders: tuple[pathlib.Path, ...] = option(positional=True)
    papers: bool = False
    out: pathlib.Path | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs ``kvjax compare``; returns the exit code."""
    about = "Compare methods with Full, example by example."
    return run(_compare, CompareCommand, prog="kvjax compare", about=about, argv=argv)


def _compare(command: CompareCommand) -> None:
    text = report(command.folders, papers=command.papers)
    if command.out is None:
        print(text, end="")
    else:
        write_bytes(command.out, text.encode())
        print(f"written: {command.out}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
