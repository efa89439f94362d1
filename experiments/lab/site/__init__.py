"""The Sphinx extension of the documentation: pages and tables made from docstrings and records when the site is built.

Directives for pages in Markdown: ``{record} FILE`` shows the tables of a record or of a result folder; ``:columns:``
takes some columns of its metrics instead, ``:where:`` some rows.
``{methods}`` lists all methods, or those that it names. ``{knobs} METHOD`` lists the hyper-parameters of a method.
``{operations}`` and ``{families}`` list the operations of `pallas_kernels` and the families of models that load.
"""

import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective

from experiments.lab.site import catalogue, methods, records
from experiments.records import write_bytes


class Generated(SphinxDirective):
    """A directive whose content is Markdown that the function of its name in `_TEXTS` makes."""

    optional_arguments = 1
    final_argument_whitespace = True
    option_spec: ClassVar[dict[str, Any]] = dict.fromkeys(("columns", "where"), directives.unchanged)

    def run(self) -> list[nodes.Node]:
        """Parse the text; its headings become bold lines, because a directive cannot open a section."""
        text = re.sub(r"^#+ (.+)$", r"**\1**", _TEXTS[self.name](self), flags=re.MULTILINE)
        box = nodes.container()
        self.state.nested_parse(StringList(text.splitlines(), source=self.get_source_info()[0]), self.content_offset, box)
        return box.children


def _record(directive: Generated) -> str:
    """Make the tables of a record, and tell Sphinx to build the page again when the record changes."""
    path = pathlib.Path(directive.env.srcdir) / directive.arguments[0]
    for file in path.glob("*.json") if path.is_dir() else [path]:
        directive.env.note_dependency(str(file))
    if "columns" not in directive.options:
        return records.tables(path)
    where = dict(part.strip().split("=") for part in directive.options.get("where", "").split(",") if part.strip())
    return records.columns(path, [name.strip() for name in directive.options["columns"].split(",")], where)


def _methods(directive: Generated) -> str:
    """Make the table of methods, with links to their pages from the page of the directive."""
    up = "../" * directive.env.docname.count("/")
    return methods.table(up + "methods/{}.md", directive.arguments[0].split() if directive.arguments else None)


_TEXTS: Mapping[str, Callable[[Generated], str]] = {
    "record": _record,
    "methods": _methods,
    "knobs": lambda directive: methods.knobs(directive.arguments[0]),
    "operations": lambda _: catalogue.operations(),
    "families": lambda _: catalogue.families(),
}


def write_pages(app: Any) -> None:
    """Write the pages of methods and of records into the source folder; a file that has its text is left alone."""
    docs = pathlib.Path(app.srcdir)
    for folder, pages in {"methods": methods.pages(docs), "tables": records.pages(docs)}.items():
        for old in (docs / folder).glob("*.md"):
            if old.name not in pages:
                old.unlink()
        for name, text in pages.items():
            write_text(docs / folder / name, text)
    for notebook in sorted((docs.parent / "notebooks").glob("*.ipynb")):
        text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")  # the copy is one folder deeper
        write_text(docs / "notebooks" / notebook.name, text)


def write_text(path: pathlib.Path, text: str) -> None:
    """Write a page unless it has this text already, so that builds stay incremental."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_bytes(path, text.encode())


def setup(app: Any) -> dict[str, bool]:
    """Register the directives and the writing of pages; Sphinx calls this function once."""
    for name in _TEXTS:
        app.add_directive(name, Generated)
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True}
