"""Parts of the methods, one at a time: `python -m experiments.ablations NAME[,NAME]|all --out docs/records/ablations`.

The names are votes, theta, extrapolate, sentences, chess, channels, hashing and causes. Each ablation writes OUT/NAME.json
after every cell, and goes on from it after an interruption. A Markdown file has the tables of all records in OUT. The
question is part of the prompt.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments.ablations.run import run_ablations
from experiments.ablations.settings import AblationSettings
from experiments.answering import load_model
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
    run_ablations(settings, load_model(settings.model, settings.dtype, offline=settings.offline), command.out)
    print(table_file(command.out).read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main())
