"""Writes all generated pages of the documentation site, and the figures and tables from the records in ``docs``."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from experiments.cli import write_figures
from experiments.lab.site import (
    agreement,
    choice,
    distance,
    method_pages,
    operations,
    paper_tables,
    quality,
    record_pages,
    record_tables,
    untouched,
)
from experiments.lab.site.address import addressed
from experiments.lab.site.marks import names_of, with_parts
from experiments.records import write_bytes
from models.files.tables import family_table

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"
# The figures that the pages show, by their files in docs/records: the record or result folder of each, and its kind. These
# files are in the repository, and git ignores all other figures.
FIGURES = {
    "ablations/drift.png": ("ablations/drift.json", "drift"),
    "exact/qwen-16k.png": ("exact/qwen-16k.json", "exact"),
    "exact/qwen-32k.png": ("exact/qwen-32k.json", "exact"),
    "demo-16k.png": ("demo-16k.json", "demo"),
    "fidelity/base/along.png": ("fidelity/base", "along"),
    "fidelity/base/fidelity.png": ("fidelity/base", "fidelity"),
    "fidelity/qwen/along.png": ("fidelity/qwen", "along"),
    "fidelity/qwen-1024/along.png": ("fidelity/qwen-1024", "along"),
    "fidelity/qwen/fidelity.png": ("fidelity/qwen", "fidelity"),
    "insight.png": ("insight.json", "insight"),
    "results/long-answers-4k/memory.png": ("results/long-answers-4k", "memory"),
    "results/qwen-16k/solved.png": ("results/qwen-16k", "solved"),
    "results/main/pareto.png": ("results/main", "pareto"),
    "results/sweep-snapkv/pareto.png": ("results/sweep-snapkv", "pareto"),
    "results/toy/pareto.png": ("results/toy", "pareto"),
    "speed-h200.png": ("speed-h200.json", "speed"),
    "speed-four-scaling.png": ("speed-four.json", "scaling"),
}


def write_pages(out: pathlib.Path, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
    """Write the pages that are made anew for every build: a page for each method, and the list of records.

    A file that already has its text is left alone, so that builds stay incremental. Pages of methods that no longer exist are
    removed.

    Args:
        out: folder of the pages; it is made if it does not exist.
        docs: folder of the documentation, with the folder ``records`` in it.

    Returns:
        The files.
    """
    pages = method_pages.pages(docs)
    for old in (out / "methods").glob("*.md"):
        if old.name not in pages:
            old.unlink()
    texts = {out / "methods" / name: text for name, text in pages.items()}
    texts[out / "records.md"] = record_pages.page(docs)
    for file, text in texts.items():
        write_text(file, text)
    return list(texts)


def write_tables(docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
    """Write the tables again: the records' tables in ``docs/tables`` and result folders, and the parts between marks.

    Returns:
        The files.
    """
    texts = addressed(docs.parent) | record_tables.pages(docs) | marked_pages(docs)
    for file, text in texts.items():
        write_text(file, text)
    return list(texts)


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """List the functions that make the parts of pages that stand between marks, by name."""
    made: dict[str, Callable[[], str]] = {}
    made["families"] = family_table.markdown
    for module in (quality, untouched, agreement, distance, choice, paper_tables, operations):
        made |= module.parts(docs)
    return made


def marked_pages(docs: pathlib.Path) -> dict[pathlib.Path, str]:
    """Write the text of the README and of every page of ``docs`` that has generated parts, with these parts made again."""
    known = parts(docs)
    files = [docs.parent / "README.md", *sorted(docs.glob("*.md"))]
    texts = {file: file.read_text(encoding="utf-8") for file in files if file.exists()}
    return {file: with_parts(text, known) for file, text in texts.items() if names_of(text)}


def figures(docs: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Return the entries of `FIGURES` whose records exist."""
    return {file: made for file, made in FIGURES.items() if (docs / "records" / made[0]).exists()}


def draw_figures(docs: pathlib.Path = DOCS, again: bool = True) -> list[pathlib.Path]:
    """Draw the figures that the pages show, from their records, and return the files that were drawn.

    Args:
        docs: folder of the documentation, with the folder ``records`` in it.
        again: also draw the figures that exist already.
    """
    written, records = [], docs / "records"
    for file, (record, kind) in figures(docs).items():
        if again or not (records / file).exists():
            written += write_figures(records / record, [kind], (records / file).parent, ("png",))
    return written


def write_text(file: pathlib.Path, text: str) -> None:
    """Write a file atomically, unless it already has this text."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        write_bytes(file, text.encode())
