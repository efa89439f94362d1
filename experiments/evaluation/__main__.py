"""Score methods on suites, Full first; or a grid of one method's knobs, in a single compile.

`--methods snapkv --grid budget=64,128,256 --grid kernel=5,7` scores all combinations of these values. Knobs that change
no shape are varied within one compiled program, whose arrays have room for the largest setting.
"""

from __future__ import annotations

import dataclasses
import sys

from experiments.cli import Against, Job, option
from experiments.evaluation.grid import run_grid, the_grid
from experiments.evaluation.output import Output, finish, make_runner
from experiments.evaluation.settings import EvaluationSettings, set_knobs
from experiments.records import with_figures


@dataclasses.dataclass(frozen=True)
class MethodKnobs:
    """Knobs for the methods of the settings; a YAML file may also give them with the methods' names.

    Attributes:
        set: a knob of a method; repeatable
        grid: values of a knob of the only method, with ; between values that have commas; repeatable
    """

    set: tuple[str, ...] = option((), repeat=True, metavar="METHOD.KNOB=VALUE")
    grid: tuple[str, ...] = option((), repeat=True, metavar="KNOB=V1,V2,...")


def _eval(settings: EvaluationSettings, more: MethodKnobs, output: Output, against: Against) -> None:
    output = with_figures(output)
    settings = dataclasses.replace(settings, methods=set_knobs(settings.methods, more.set))
    grid = the_grid(settings, more.grid) if more.grid else None  # refuses a bad grid before the model is loaded
    if grid is None:
        runner = make_runner(settings, output)
        runner.run()
    else:
        runner = make_runner(dataclasses.replace(settings, methods=()), output)
        run_grid(runner, grid)
    finish(runner.folder, output, against)


main = Job(_eval, EvaluationSettings, MethodKnobs, Output, Against, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
