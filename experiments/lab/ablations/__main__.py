"""Ablations: parts of the methods, varied one at a time: `python -m experiments.lab.ablations NAME[,NAME]|all`.

Each ablation writes OUT/NAME.json after every cell, and continues that file after an interruption. A Markdown file has the
papers' claims and the tables of all records in OUT. The question is part of the prompt, in the model's chat template. A task
that Full does not solve is left out. All ablations of the tuned SmolLM2, with distances measured on its base model:

    python -m experiments.lab.ablations all --model smollm2-retrieval --base smollm2
"""

from __future__ import annotations

import dataclasses
import pathlib

from experiments.answering import load_model
from experiments.cli import Job
from experiments.lab.ablations.cluster_drift import Course, run_drift
from experiments.lab.ablations.report import ablation_tables, records_in
from experiments.lab.ablations.run import run_ablation
from experiments.lab.ablations.settings import DRIFT, AblationSettings
from experiments.records import table_file, write_bytes


@dataclasses.dataclass(frozen=True)
class AblationCommand:
    """The output of `experiments.lab.ablations`.

    Attributes:
        out: directory of records
    """

    out: pathlib.Path = pathlib.Path("runs/ablations")


def _ablate(settings: AblationSettings, command: AblationCommand) -> None:
    model = base = settings.load()
    if settings.base not in (None, settings.model):
        base = load_model(settings.base, settings.dtype, offline=settings.offline, weight_dtype=settings.weight_dtype)
    file = table_file(command.out)
    for name in settings.ablations:
        record = command.out / f"{name}.json"
        if name != DRIFT:
            run_ablation(settings, name, model, base, command.out)
        elif not record.exists():
            run_drift(base, Course.within(base.config.max_position_embeddings, settings.seed), record)
        write_bytes(file, ablation_tables(records_in(command.out), file.parent).encode())
    print(file.read_text(encoding="utf-8"))


main = Job(_ablate, AblationSettings, AblationCommand, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
