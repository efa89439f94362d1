"""The output of eval and sweep: table and figures in the folder, the table or a JSON line on standard output."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

from experiments.cli import write_figures
from experiments.evaluation.cells import make_cells
from experiments.evaluation.comparison import averages, beside_full, load, place_of
from experiments.evaluation.folder import Folder
from experiments.evaluation.runner import Runner
from experiments.evaluation.settings import EvaluationSettings
from experiments.evaluation.tables import cell_table, remarks, report, summary_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown of results.

    Attributes:
        plot: draw figures (needs matplotlib)
        json: print a JSON line instead of the table
        quiet: show no progress
    """

    plot: bool = True
    json: bool = False
    quiet: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output(Shown):
    """Where results go, and what is shown.

    Attributes:
        out: result folder; a finished cell is not run again
        force: throw away what the folder holds
    """

    out: pathlib.Path
    force: bool = False


def make_runner(settings: EvaluationSettings, output: Output) -> Runner:
    """Load the model, and make the runner of an evaluation.

    Raises:
        ValueError: a file of the tasks is missing or damaged, or an error of `Runner`.
    """
    cells = make_cells(settings)  # refuses damaged files before the model is loaded
    return Runner(settings, settings.load(), output.out, cells=cells, force=output.force, progress=not output.quiet)


def finish(folder: Folder, output: Output) -> None:
    """Write the table and the figures into the folder; print the table, or a JSON line."""
    folder.keep_examples()
    written = [folder.write("table.md", report([folder.path]))]
    if output.plot:
        written += write_figures(folder.path, [], folder.path)
    compared = beside_full(load([folder.path]))
    if output.json:
        rows = sorted(folder.rows, key=place_of(folder.rows))
        print(json.dumps({"folder": str(folder.path), "means": averages(compared), "rows": rows}))
    else:
        scored = any(item.row["unit"] == "percent" for item in compared)
        table = summary_table(compared) if scored else cell_table(compared)
        print("\n\n".join([table, *remarks(compared)]))
    if not output.quiet:
        print("written: " + ", ".join(str(path) for path in written), file=sys.stderr)
