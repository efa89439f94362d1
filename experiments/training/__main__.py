"""Trains the built-in retrieval model: `python -m experiments.training --out DIR [--text FILE ...]`.

Saves checkpoints as it goes, stops cleanly on SIGTERM, Ctrl-C or after `--minutes`, and goes on with `--resume` exactly
where it was. Writes DIR/train_log.jsonl, and a Hugging Face directory DIR/export whenever it ends.
"""

from __future__ import annotations

import argparse
import math
import os
import pathlib


def main() -> None:
    """Command line."""
    # Imported here because every data worker imports this module again, and none of them needs JAX.
    from experiments.training import trainer

    parser = argparse.ArgumentParser(description="Train the built-in retrieval model.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="checkpoints, log and export go here")
    parser.add_argument("--text", type=pathlib.Path, nargs="*", default=[], help="prose files besides pydoc_data")
    parser.add_argument(
        "--tokenizer",
        type=pathlib.Path,
        default=trainer.BUILTIN,
        help="directory with tokenizer.json (default: the built-in model's)",
    )
    parser.add_argument("--size", choices=("toy", "full"), default="full", help="model and batch size")
    parser.add_argument("--steps", type=int, help="optimiser steps of the whole run (default: the size's)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="save and stop after this wall-clock time")
    parser.add_argument("--save-minutes", type=float, default=4.0, help="minutes between checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --out")
    parser.add_argument("--seed", type=int, default=0, help="seed of parameters and data")
    parser.add_argument(
        "--workers",
        type=int,
        default=max(1, min(14, (os.cpu_count() or 1) - 2)),
        help="data processes (0: none besides this one)",
    )
    arguments = parser.parse_args()
    size = trainer.sizes(arguments.size)
    trainer.train(
        arguments.out,
        size=size,
        steps=arguments.steps or size.steps,
        texts=arguments.text,
        tokenizer=arguments.tokenizer,
        minutes=arguments.minutes,
        save_minutes=arguments.save_minutes,
        resume=arguments.resume,
        seed=arguments.seed,
        workers=arguments.workers,
    )
    print(f"log: {arguments.out / 'train_log.jsonl'}; model: {arguments.out / 'export'}")


if __name__ == "__main__":
    main()
