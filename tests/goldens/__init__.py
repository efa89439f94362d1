"""Stored numbers of other programs, each with the script that made it; `FOLDER` is where they are."""

import pathlib

FOLDER = pathlib.Path(__file__).parent
