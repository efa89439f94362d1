"""Stored numbers of other programs; `FOLDER` is where they are.

`models/*.npz` come from `experiments/lab/goldens.py`, `models/families` from the script there. The makers of the others live
at commit 54f2e05c: ``git show 54f2e05c:experiments/lab/goldens/NAME.py``, where NAME is that of the JSON file.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parent
