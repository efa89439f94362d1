"""Stored numbers of other programs, which `experiments/lab/goldens` makes; `FOLDER` is where they are."""

import pathlib

FOLDER = pathlib.Path(__file__).parent
