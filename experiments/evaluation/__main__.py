"""Score methods on suites, Full first; or a grid of one method's knobs.

`--methods snapkv --grid budget=64,128,256 --grid kernel=5,7` scores all combinations of these values. Knobs that change no
shape are varied within one compiled program, whose arrays have room for the largest setting.
"""

from __future__ import annotations

import dataclasses
import sys

from experiments.answering import set_knobs
from experiments.cli import Job, option
from experiments.evaluation.grid import the_grid
from experiments.evaluation.output import Output, finish, make_runner
from experiments.evaluation.settings import EvaluationSettings
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


def _eval(settings: EvaluationSettings, more: MethodKnobs, output: Output) -> None:
    output = with_figures(output)
    settings = dataclasses.replace(settings, methods=set_knobs(settings.methods, more.set))
    if more.grid:
        settings = dataclasses.replace(settings, methods=the_grid(settings, more.grid))
    runner = make_runner(settings, output)
    runner.run()
    finish(runner.folder, output)


main = Job(_eval, EvaluationSettings, MethodKnobs, Output, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
