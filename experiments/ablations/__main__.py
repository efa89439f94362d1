"""Parts of the methods, one at a time: `python -m experiments.ablations NAME[,NAME]|all --out docs/ablations`.

The names are votes, theta, extrapolate, sentences, chess, channels, hashing and causes. Each ablation writes OUT/NAME.json
after every cell, and goes on from it after an interruption. OUT.md has the tables of all records in OUT. The question is part
of the prompt.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments.ablations.run import run_ablations
from experiments.ablations.settings import AblationSettings
from experiments.answering import load_model
from experiments.cli import run


@dataclasses.dataclass(frozen=True)
class AblationCommand:
    """Where `experiments.ablations` writes.

    Attributes:
        out: directory of records
    """

    out: pathlib.Path = pathlib.Path("docs/ablations")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    about = "Ablations of the five papers' methods."
    return run(_ablate, AblationSettings, AblationCommand, prog="kvjax ablations", about=about, argv=argv)


def _ablate(settings: AblationSettings, command: AblationCommand) -> None:
    run_ablations(settings, load_model(settings.model, settings.dtype), command.out)
    print(command.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    raise SystemExit(main())
