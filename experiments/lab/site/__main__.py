"""Writes the generated pages of the documentation: `python -m experiments.lab.site OUT`.

OUT gets a page for each method and the list of records. The build of the site writes the same pages. ``--tables`` and
``--figures`` also make the tables and figures of docs again, from their records, and ``--notebooks`` runs the notebooks.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from experiments.cli import Job, option
from experiments.lab.site import operations
from experiments.lab.site.notebooks import run_notebooks
from experiments.lab.site.pages import DOCS, draw_figures, write_pages, write_tables
from experiments.records import check_installed


@dataclasses.dataclass(frozen=True)
class SiteCommand:
    """The folders and the parts that `experiments.lab.site` writes.

    Attributes:
        out: folder of the pages
        docs: folder of the documentation, with the folder records in it (default: this checkout's)
        tables: also write the tables of the records again
        figures: also draw the figures of the pages again (needs matplotlib)
        operations: also trace again which methods call which operations (two minutes)
        notebooks: also run the notebooks and keep their outputs (a few minutes; needs the extra 'test')
    """

    out: pathlib.Path = option(positional=True)
    docs: pathlib.Path | None = None
    tables: bool = False
    figures: bool = False
    operations: bool = False
    notebooks: bool = False


def _write(command: SiteCommand) -> None:
    docs = command.docs or DOCS
    if command.figures:
        check_installed()
    traced = [operations.record(docs)] if command.operations else []
    written = traced + write_pages(command.out, docs)
    if command.tables:
        written += write_tables(docs)
    if command.figures:
        written += draw_figures(docs)
    if command.notebooks:
        written += run_notebooks()
    print(f"{len(written)} files written or unchanged, in {command.out}", file=sys.stderr)


main = Job(_write, SiteCommand)


if __name__ == "__main__":
    raise SystemExit(main())
