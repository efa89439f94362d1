"""Settings of the documentation site: ``python -m sphinx -W -b html docs docs/_build``.

Pages of methods and of records are written here before the build, notebooks are copied beside them, and figures that pages
show are drawn from their records where they are missing. Git ignores these pages and notebooks. Notebooks are executed by the
build, which shows their outputs.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the site builds from a checkout that is not installed, too
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # in notebooks

project = "kvjax"
author = "kvjax contributors"
copyright = "kvjax contributors, Apache-2.0"  # the name is Sphinx's
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "jupyter_execute", "**/.ipynb_checkpoints"]
smartquotes = False  # quotation marks in docstrings are often code
html_theme = "furo"
html_title = "kvjax"

nb_execution_mode = "force"
nb_execution_timeout = 300  # seconds of one cell
nb_execution_raise_on_error = True
myst_heading_anchors = 3

default_role = "code"  # docstrings write `name` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False


def write_pages(app: Any) -> None:
    """Write the generated pages into the source folder."""
    from experiments.lab import site

    source = pathlib.Path(app.srcdir)
    site.write_pages(source, source)
    site.draw_figures(source, again=False)
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")  # the copy is one folder deeper
        site.write_text(source / "notebooks" / notebook.name, text)


def setup(app: Any) -> None:
    """Connect `write_pages`; Sphinx calls this function once."""
    app.connect("builder-inited", write_pages)
