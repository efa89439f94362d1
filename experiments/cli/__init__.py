"""The command line: jobs, whose settings are flags and YAML keys, and the table of commands. This package knows no job."""

from experiments.cli.job import Job as Job
from experiments.cli.job import guarded as guarded
from experiments.cli.plot import figures as figures
from experiments.cli.plot import naming as naming
from experiments.cli.plot import read_record as read_record
from experiments.cli.plot import write_figures as write_figures
from experiments.cli.programs import CompiledPrograms as CompiledPrograms
from experiments.cli.programs import Operations as Operations
from experiments.cli.settings import Settings as Settings
from experiments.cli.settings import names as names
from experiments.cli.settings import option as option
from experiments.cli.settings import output_file as output_file
from experiments.cli.settings import output_folder as output_folder
from experiments.cli.settings import record_path as record_path
from experiments.cli.yaml_text import read_yaml as read_yaml
