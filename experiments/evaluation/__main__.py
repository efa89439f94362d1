"""Score methods on suites, Full first; or a grid of one method's knobs.

`--methods snapkv --grid budget=64,128,256 --grid kernel=5,7` scores all combinations of these values. Knobs that change no
shape are varied within one compiled program, whose arrays have room for the largest setting.
"""

import dataclasses
import json
import pathlib
import sys

from experiments.answering import set_knobs
from experiments.cli import Job, option, output_folder, write_figures
from experiments.evaluation.cells import make_cells
from experiments.evaluation.comparison import averages, beside_reference, load, place_of
from experiments.evaluation.folder import Folder
from experiments.evaluation.grid import the_grid
from experiments.evaluation.runner import Runner
from experiments.evaluation.settings import EvaluationSettings, Shown
from experiments.evaluation.tables import cell_table, remarks, report, summary_table
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Shown):
    """Where results go, and what is shown.

    Attributes:
        out: result folder; a finished cell is not run again
        force: throw away what the folder holds
    """

    out: pathlib.Path = option(read=output_folder)
    force: bool = False


def _eval(settings: EvaluationSettings, more: MethodKnobs, output: Output) -> None:
    output = with_figures(output)
    settings = dataclasses.replace(settings, methods=set_knobs(settings.methods, more.set))
    if more.grid:
        settings = dataclasses.replace(settings, methods=the_grid(settings, more.grid))
    cells = make_cells(settings)  # refuses damaged files before the model is loaded
    runner = Runner(settings, settings.load(), output.out, cells=cells, force=output.force, progress=not output.quiet)
    runner.run()
    _finish(runner.folder, output)


def _finish(folder: Folder, output: Output) -> None:
    """Write the table and the figures into the folder; print the table, or a JSON line."""
    folder.keep_examples()
    written = [folder.write("table.md", report([folder.path]))]
    if output.plot:
        written += write_figures(folder.path, [], folder.path)
    compared = beside_reference(load([folder.path]))
    if output.json:
        rows = sorted(folder.rows, key=place_of(folder.rows))
        print(json.dumps({"folder": str(folder.path), "means": averages(compared), "rows": rows}))
    else:
        scored = any(item.row["unit"] == "percent" for item in compared)
        print("\n\n".join([summary_table(compared) if scored else cell_table(compared), *remarks(compared)]))
    if not output.quiet:
        print("written: " + ", ".join(str(path) for path in written), file=sys.stderr)


main = Job(_eval, EvaluationSettings, MethodKnobs, Output, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
