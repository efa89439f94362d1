"""Parts of the methods, one at a time: `python -m experiments.ablations NAME[,NAME]|all --out docs/records/ablations`.

Each ablation writes OUT/NAME.json after every cell, and goes on from it after an interruption. A Markdown file has the
papers' claims and the tables of all records in OUT. The question is part of the prompt, in the model's chat template. A task
that Full does not solve is left out. All of it for the tuned twin of SmolLM2, with distances on its base:

    python -m experiments.ablations all --model smollm2-retrieval --base smollm2 --processes 4 --out docs/records/ablations
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments.ablations.jobs import run_all
from experiments.ablations.settings import AblationSettings
from experiments.cli import run
from experiments.records import table_file


@dataclasses.dataclass(frozen=True)
class AblationCommand:
    """Where `experiments.ablations` writes.

    Attributes:
        out: directory of records
    """

    out: pathlib.Path = pathlib.Path("docs/records/ablations")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    about = "Ablations of the five papers' methods."
    return run(_ablate, AblationSettings, AblationCommand, prog="kvjax ablations", about=about, argv=argv, compiles=True)


def _ablate(settings: AblationSettings, command: AblationCommand) -> None:
    run_all(settings, command.out)
    print(table_file(command.out).read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main())
