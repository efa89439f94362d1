"""``kvjax sweep``: score a grid of a method's knobs in a single compile."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from experiments.answering import read_knobs
from experiments.cli import Against, Job, option
from experiments.evaluation.grid import Grid, run_sweep
from experiments.evaluation.output import Output, finish, make_runner
from experiments.evaluation.settings import CellSettings, Choice, EvaluationSettings
from experiments.records import with_figures
from kvjax import registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepSettings(CellSettings):
    """The grid of knobs that is run, and its cells.

    Attributes:
        method: see kvjax ls; or package.module:Class; or a wrapper such as twilight(quest)
        grid: values of a knob, with ; between values that have commas; repeatable
        set: a knob that all settings have; repeatable

    Raises:
        ValueError: an unknown name, or a malformed grid or knob.
    """

    method: str
    grid: tuple[str, ...] = option(repeat=True, metavar="KNOB=V1,V2,...")
    set: tuple[str, ...] = option((), repeat=True, metavar="KNOB=VALUE")

    def __post_init__(self) -> None:
        super().__post_init__()
        # A file's examples have lengths of their own, at which `run_sweep` checks the grid.
        self.knob_grid().check(self.lengths if self.generated else ())

    def knob_grid(self) -> Grid:
        """Parse the grid."""
        varied: dict[str, list[Any]] = {}
        for text in self.grid:
            knob, equals, values = text.partition("=")
            knob = knob.strip()
            if not equals or not values.strip():
                raise ValueError(f"--grid takes KNOB=V1,V2,..., got {text!r}")
            if knob in varied:
                raise ValueError(f"--grid names {knob} twice; give all its values at once: {knob}=V1,V2,...")
            parts = values.split(";" if ";" in values else ",")
            varied[knob] = [read_knobs(self.method, [f"{knob}={value}"])[knob] for value in parts]
        name, knobs = registry.parse_method(self.method, read_knobs)
        return Grid(name, {**knobs, **read_knobs(name, self.set)}, varied)

    def beside(self) -> EvaluationSettings:
        """Make the settings of the evaluation that runs Full on the same cells."""
        shared = {field.name: vars(self)[field.name] for field in dataclasses.fields(CellSettings)}
        return EvaluationSettings(**shared, methods=(Choice("full", {}),))


def _sweep(settings: SweepSettings, output: Output, against: Against) -> None:
    output = with_figures(output)
    runner = make_runner(settings.beside(), output)
    run_sweep(runner, settings.knob_grid())
    finish(runner.folder, output, against)


main = Job(_sweep, SweepSettings, Output, Against, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
