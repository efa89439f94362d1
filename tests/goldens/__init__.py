"""Stored numbers of other programs; `FOLDER` is where they are.

`models/families` come from the script there. The maker of `models/*.npz` lives at a34bfaf4, experiments/lab/goldens.py,
beside the tests that ran transformers itself. The makers of the others live at commit 54f2e05c:
``git show 54f2e05c:experiments/lab/goldens/NAME.py``, where NAME is that of the JSON file.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parent
