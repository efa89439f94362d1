"""``kvjax eval`` and ``kvjax sweep``: methods on suites, in result folders that later runs continue, compared with Full."""

from experiments.evaluation.folder import read_runs as read_runs
from experiments.evaluation.plots import figures as figures
from experiments.evaluation.tables import report as report
