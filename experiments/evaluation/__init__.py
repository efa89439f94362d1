"""`kvjax eval`: score methods on suites against Full, into result folders that later runs continue."""

from experiments.evaluation.ahead import CompileAhead as CompileAhead
from experiments.evaluation.comparison import BASELINE as BASELINE
from experiments.evaluation.comparison import COUNTED as COUNTED
from experiments.evaluation.comparison import Compared as Compared
from experiments.evaluation.comparison import Entry as Entry
from experiments.evaluation.comparison import averages as averages
from experiments.evaluation.comparison import beside_reference as beside_reference
from experiments.evaluation.comparison import load as load
from experiments.evaluation.folder import Folder as Folder
from experiments.evaluation.folder import read_predictions as read_predictions
from experiments.evaluation.plots import figures as figures
from experiments.evaluation.runner import Runner as Runner
from experiments.evaluation.settings import EvaluationSettings as EvaluationSettings
from experiments.evaluation.settings import Shown as Shown
from experiments.evaluation.tables import against as against
from experiments.evaluation.tables import report as report
from experiments.evaluation.understanding import by_kind as by_kind
