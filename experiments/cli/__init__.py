"""The command line: flags and YAML keys from settings, and the table of commands. This package knows no job."""

from experiments.cli.against import Against as Against
from experiments.cli.against import committed as committed
from experiments.cli.against import compared as compared
from experiments.cli.compiled import CompiledPrograms as CompiledPrograms
from experiments.cli.flags import guarded as guarded
from experiments.cli.flags import run as run
from experiments.cli.operations import Operations as Operations
from experiments.cli.plot import figures as figures
from experiments.cli.plot import read_record as read_record
from experiments.cli.plot import write_figures as write_figures
from experiments.cli.settings import Option as Option
from experiments.cli.settings import Settings as Settings
from experiments.cli.settings import option as option
from experiments.cli.settings import parse_yaml as parse_yaml
from experiments.cli.settings import read_yaml as read_yaml
from experiments.cli.settings import write_yaml as write_yaml
from experiments.cli.showing import shown_texts as shown_texts
from experiments.cli.types import items as items
from experiments.cli.types import names as names
from experiments.cli.types import numbers as numbers
from experiments.cli.types import pair as pair
from experiments.cli.types import positive as positive
from experiments.cli.types import record_path as record_path
