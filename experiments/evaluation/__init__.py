"""``kvjax eval`` and ``kvjax sweep``: methods on suites, in result folders that later runs continue, compared with Full."""

from experiments.evaluation.ahead import CompileAhead as CompileAhead
from experiments.evaluation.comparison import Compared as Compared
from experiments.evaluation.comparison import Entry as Entry
from experiments.evaluation.comparison import averages as averages
from experiments.evaluation.comparison import beside_full as beside_full
from experiments.evaluation.comparison import load as load
from experiments.evaluation.folder import read_runs as read_runs
from experiments.evaluation.knobs import set_knobs as set_knobs
from experiments.evaluation.order import SOLVED as SOLVED
from experiments.evaluation.order import Change as Change
from experiments.evaluation.order import Difference as Difference
from experiments.evaluation.order import changes as changes
from experiments.evaluation.order import kendall_tau as kendall_tau
from experiments.evaluation.order import mean_scores as mean_scores
from experiments.evaluation.order import solved as solved
from experiments.evaluation.plots import figures as figures
from experiments.evaluation.settings import Choice as Choice
from experiments.evaluation.settings import EvaluationSettings as EvaluationSettings
from experiments.evaluation.settings import at_budgets as at_budgets
from experiments.evaluation.settings import check_choices as check_choices
from experiments.evaluation.settings import choices_of as choices_of
from experiments.evaluation.settings import written as written
from experiments.evaluation.tables import report as report
