"""``kvjax eval``: score methods on suites, Full first."""

from __future__ import annotations

import dataclasses
import sys

from experiments.cli import Against, Job, option
from experiments.evaluation.knobs import with_knobs
from experiments.evaluation.output import Output, finish, make_runner
from experiments.evaluation.settings import EvaluationSettings
from experiments.records import with_figures


@dataclasses.dataclass(frozen=True)
class MethodKnobs:
    """Knobs for the methods of the settings; a YAML file gives them with the methods' names.

    Attributes:
        set: a knob of a method; repeatable
    """

    set: tuple[str, ...] = option((), repeat=True, metavar="METHOD.KNOB=VALUE")


def _eval(settings: EvaluationSettings, more: MethodKnobs, output: Output, against: Against) -> None:
    output = with_figures(output)
    runner = make_runner(with_knobs(settings, more.set), output)
    runner.run()
    finish(runner.folder, output, against)


main = Job(_eval, EvaluationSettings, MethodKnobs, Output, Against, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
