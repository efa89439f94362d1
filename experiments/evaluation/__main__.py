"""``kvjax eval``: score methods on suites, Full first."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from experiments.cli import Against, option, run
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvjax eval``; return the exit code."""
    about = "Score methods on suites, Full first."
    kinds = (EvaluationSettings, MethodKnobs, Output, Against)
    return run(_eval, *kinds, prog="kvjax eval", about=about, argv=argv, compiles=True)


def _eval(settings: EvaluationSettings, more: MethodKnobs, output: Output, against: Against) -> None:
    output = with_figures(output)
    runner = make_runner(with_knobs(settings, more.set), output)
    runner.run()
    finish(runner.folder, output, against)


if __name__ == "__main__":
    sys.exit(main())
