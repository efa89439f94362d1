"""Trains the built-in retrieval model: `python -m experiments.training --out DIR [--text FILE ...]`.

The run saves checkpoints, stops cleanly on SIGTERM, on Ctrl-C or after `--minutes`, and goes on with `--resume` from exactly
the same state. It writes DIR/train_log.jsonl, and a Hugging Face directory DIR/export whenever it ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiments.cli import run
from experiments.training.settings import TrainingCommand, TrainingSettings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    about = "Train the built-in retrieval model."
    return run(_train, TrainingSettings, TrainingCommand, prog="kvjax train", about=about, argv=argv, compiles=True)


def _train(settings: TrainingSettings, command: TrainingCommand) -> None:
    # Imported here, because every data worker imports this module again, and no worker needs JAX.
    from experiments.training.trainer import BUILTIN, sizes, train

    size = sizes(settings.size)
    train(
        command.out,
        size=size,
        steps=settings.steps or size.steps,
        texts=settings.text,
        tokenizer=settings.tokenizer or BUILTIN,
        minutes=command.limit,
        save_minutes=command.save_minutes,
        resume=command.resume,
        seed=settings.seed,
        workers=command.workers,
    )
    print(f"log: {command.out / 'train_log.jsonl'}; model: {command.out / 'export'}")


if __name__ == "__main__":
    raise SystemExit(main())
