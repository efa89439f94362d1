"""Trains the built-in retrieval model: `python -m experiments.lab.training --out DIR [--text FILE ...]`.

The run saves a checkpoint, and stops cleanly on SIGTERM, on Ctrl-C or after `--minutes`. With `--resume` it continues from
exactly the same state. It writes DIR/train_log.jsonl, and a Hugging Face directory DIR/export whenever it ends.
"""

import dataclasses

from experiments.cli import Job
from experiments.lab.training.settings import TrainingCommand, TrainingSettings


def _train(settings: TrainingSettings, command: TrainingCommand) -> None:
    # Imported here, because every data worker imports this module again, and no worker needs JAX.
    import jax

    from experiments.lab.training.subject import WholeModel
    from experiments.lab.training.trainer import BUILTIN, builtin_course, train

    config, course = builtin_course(settings.size, settings.steps)
    tokenizer = settings.tokenizer or BUILTIN
    if jax.default_backend() == "cpu":
        config = dataclasses.replace(config, dtype="float32")
    course_of = {"subject": WholeModel(config, tokenizer), "course": course, "seed": settings.seed}
    train(command.out, **course_of, texts=settings.text, tokenizer=tokenizer, **command.options)
    print(f"log: {command.out / 'train_log.jsonl'}; model: {command.out / 'export'}")


main = Job(_train, TrainingSettings, TrainingCommand, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
