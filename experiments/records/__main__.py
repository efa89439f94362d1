"""``python -m experiments.records FILE...`` folds records in place; all that reads records unfolds them."""

import pathlib
import sys

from experiments.cli import read_record
from experiments.records import fold, write_record

for file in map(pathlib.Path, sys.argv[1:]):
    write_record(file, fold(read_record(file)))
