"""Settings of the documentation site: ``python -m sphinx -W -b html docs docs/_build``.

`experiments.lab.site` writes the pages of methods and of records before the build and copies the notebooks beside them; git
ignores what it writes. Notebooks are executed by the build, which shows their outputs.
"""

import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the site builds from a checkout that is not installed, too
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # in notebooks

project = "kvjax"
author = "kvjax contributors"
copyright = "kvjax contributors, Apache-2.0"  # the name is Sphinx's
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "experiments.lab.site"]
exclude_patterns = ["_build", "jupyter_execute", "**/.ipynb_checkpoints"]
smartquotes = False  # quotation marks in docstrings are often code
html_theme = "furo"
html_title = "kvjax"
html_static_path = ["_static"]
html_js_files = ["sort.js"]

nb_execution_mode = "force"
nb_execution_timeout = 300  # seconds of one cell
nb_execution_raise_on_error = True
myst_heading_anchors = 3

default_role = "code"  # docstrings write `name` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
