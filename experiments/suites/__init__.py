"""Examples of any suite, generated or read from users' files, their token ids and their scores; imports no JAX."""

from experiments.suites.base import Example as Example
from experiments.suites.cells import Cell as Cell
from experiments.suites.cells import CellStore as CellStore
from experiments.suites.cells import Encoded as Encoded
from experiments.suites.cells import Reading as Reading
from experiments.suites.cells import encode_cell as encode_cell
from experiments.suites.generated import examples as examples
from experiments.suites.generated import score as score
from experiments.suites.readers import READERS as READERS
from experiments.suites.readers import files_of as files_of
from experiments.suites.readers import parse as parse
from experiments.suites.readers import read as read
from experiments.suites.scorers import SCORERS as SCORERS
from experiments.suites.truncation import TRUNCATIONS as TRUNCATIONS
from experiments.suites.truncation import truncate as truncate
from experiments.suites.workers import end_with_parent as end_with_parent
from experiments.suites.workers import held_interrupts as held_interrupts
