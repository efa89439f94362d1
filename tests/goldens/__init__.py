"""Stored numbers of other programs; `FOLDER` is where they are.

The maker of `models/families` lives at commit 042d1743, make_goldens.py there; that of `models/*.npz` at a34bfaf4,
experiments/lab/goldens.py, beside the tests that ran transformers itself. The makers of the others live at commit 54f2e05c:
``git show 54f2e05c:experiments/lab/goldens/NAME.py``, where NAME is that of the JSON file.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parent
