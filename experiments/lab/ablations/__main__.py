"""Ablations: parts of the methods, varied one at a time: `python -m experiments.lab.ablations NAME[,NAME]|all`.

Each ablation writes OUT/NAME.json after every cell, and continues that file after an interruption. A Markdown file has the
papers' claims and the tables of all records in OUT. The question is part of the prompt, in the model's chat template. A task
that Full does not solve is left out. All ablations of the tuned SmolLM2, with distances measured on its base model:

    python -m experiments.lab.ablations all --model smollm2-retrieval --base smollm2 --processes 4
"""

from __future__ import annotations

import dataclasses
import pathlib

from experiments.cli import Against, Job
from experiments.lab.ablations.jobs import run_all
from experiments.lab.ablations.settings import AblationSettings
from experiments.records import table_file


@dataclasses.dataclass(frozen=True)
class AblationCommand:
    """The output of `experiments.lab.ablations`.

    Attributes:
        out: directory of records
    """

    out: pathlib.Path = pathlib.Path("runs/ablations")


def _ablate(settings: AblationSettings, command: AblationCommand, against: Against) -> None:
    run_all(settings, command.out)
    print(table_file(command.out).read_text(encoding="utf-8"))
    against.show(command.out)


main = Job(_ablate, AblationSettings, AblationCommand, Against, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
