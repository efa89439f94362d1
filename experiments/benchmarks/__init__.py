"""Examples of any suite, generated or read from users' files, with token ids and scores. The package imports no JAX."""

from experiments.benchmarks.cells import TRUNCATIONS as TRUNCATIONS
from experiments.benchmarks.cells import Cell as Cell
from experiments.benchmarks.cells import CellStore as CellStore
from experiments.benchmarks.cells import Encoded as Encoded
from experiments.benchmarks.cells import Reading as Reading
from experiments.benchmarks.cells import digest as digest
from experiments.benchmarks.cells import encode_cell as encode_cell
from experiments.benchmarks.cells import examples as examples
from experiments.benchmarks.cells import numbered as numbered
from experiments.benchmarks.cells import placeholder as placeholder
from experiments.benchmarks.readers import READERS as READERS
from experiments.benchmarks.readers import files_of as files_of
from experiments.benchmarks.readers import parse as parse
from experiments.benchmarks.readers import read as read
from experiments.benchmarks.scorers import measures as measures
from experiments.benchmarks.scorers import score as score
from experiments.tasks import Example as Example
