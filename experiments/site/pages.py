"""Writes all generated pages of the documentation site, and what is drawn and tabulated from the records in ``docs``."""

from __future__ import annotations

import pathlib
import re

from experiments.cli import write_figures
from experiments.records import write_bytes
from experiments.site import method_pages, record_pages, record_tables
from kvjax import registry

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
FIGURES = ("demo-16k", "drift", "insight", "offload", "speed")  # records whose figure the pages show


def write_pages(out: pathlib.Path, docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
    """Write the pages that are made anew for every build: a page for each method, and the list of records.

    A file that already has its text is left alone, so that builds stay incremental. Pages of methods that no longer exist are
    removed.

    Args:
        out: folder of the pages; it is made if need be.
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
    """Write the tables again: of the records, in ``docs/tables`` and result folders, and of methods, in the README.

    Returns the files.
    """
    texts = record_tables.pages(docs)
    readme = docs.parent / "README.md"
    if readme.exists():
        texts[readme] = with_methods(readme.read_text(encoding="utf-8"))
    for file, text in texts.items():
        write_text(file, text)
    return list(texts)


def with_methods(readme: str) -> str:
    """The README's text, its table of methods made again between the two marks."""
    return re.sub(
        r"(<!-- methods:[^>]*-->\n).*(<!-- end of methods -->)",
        lambda marks: f"{marks[1]}{registry.markdown()}\n{marks[2]}",
        readme,
        flags=re.DOTALL,
    )


def draw_figures(docs: pathlib.Path = DOCS) -> list[pathlib.Path]:
    """Draw the figures that the pages show again, from their records; returns the files."""
    written = []
    for name in FIGURES:
        record = docs / "records" / f"{name}.json"
        written += write_figures(record, [name.partition("-")[0]], record.parent, ("png",))
    for metrics in sorted((docs / "records" / "fidelity").glob("*/metrics.json")):
        written += write_figures(metrics.parent, [], metrics.parent, ("png",))
    return written


def write_text(file: pathlib.Path, text: str) -> None:
    """Write a file atomically, unless it already has this text."""
    if not file.exists() or file.read_text(encoding="utf-8") != text:
        write_bytes(file, text.encode())
