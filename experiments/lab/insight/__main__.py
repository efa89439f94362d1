"""Where does a method lose attention? `python -m experiments.lab.insight --methods quest,snapkv`.

Every method answers the same prompts. In each layer, KV head and decode step, `experiments.lab.insight.recall.Watched`
compares
the tokens that the method attends to with exact attention of the method's own queries and keys. Two shares are measured: the
share of the attention mass on the chosen tokens, and the share of the k best tokens that was chosen.

``--text full`` feeds every method the text that Full generates, so that methods are compared at the same tokens; with
``--text own`` each method continues its own text. Generation does not stop at the end of an answer; the steps up to Full's
EOS are also averaged separately. Prompts run one after the other. Methods run at the budgets of
`experiments.answering.paper_method`, and the question is part of the prompt. The record is written after every method, and a
method that is already in the record is skipped.
"""

import dataclasses
import pathlib

from experiments.cli import Job, read_record, write_figures
from experiments.lab.insight.report import table
from experiments.lab.insight.run import InsightSettings, run_methods
from experiments.lab.plot import PACKAGES
from experiments.records import Results, with_figures


@dataclasses.dataclass(frozen=True)
class InsightCommand:
    """The output of `experiments.lab.insight`.

    Attributes:
        out: path without suffix; OUT.json, OUT.png and OUT.pdf are written
        plot: draw the figure (needs matplotlib)
    """

    out: pathlib.Path = pathlib.Path("runs/insight")
    plot: bool = True


def _insight(settings: InsightSettings, command: InsightCommand) -> None:
    command = with_figures(command)
    model, path = settings.load(), command.out.with_suffix(".json")
    about = {"model": model.name, "weights": model.weights, "dtype": model.config.dtype}
    run_methods(settings, model, Results(path, "insight", {**settings.common, **about}))
    if command.plot:
        write_figures(path, [], path.parent, packages=PACKAGES)
    print(table(read_record(path)))


main = Job(_insight, InsightSettings, InsightCommand, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
