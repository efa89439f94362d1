"""Trains a low-rank adapter on the retrieval tasks: `python -m experiments.lab.training.adapter --out DIR [--text FILE ...]`.

The base stays as it is, and the adapter is a small file beside it (`models.files.adapter`). Rows are chats in the base's own
template, and prose, which the adapted model must still predict as the base does. Otherwise a run goes like a run of
`experiments.lab.training`: it saves, stops and resumes.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib

from experiments.cli import Job, Settings, option
from experiments.lab.training.settings import TrainingCommand


@dataclasses.dataclass(frozen=True)
class AdapterSettings(Settings):
    """What `experiments.lab.training.adapter` trains.

    Attributes:
        base: the model that is adapted: a name (see kvjax ls models) or what else --model takes; it must have a chat template
        text: prose files besides pydoc_data
        rank: columns of the adapter's first factors
        stretch: the adapted model's context is longer by this factor
        lengths: comma-separated, tokens of rows; later ones join later
        tokens_per_step: rows x length of a batch
        steps: optimiser steps of the whole run
        peak: highest learning rate
        lm_weight: weight of the distance to the base's predictions of prose, beside the loss of the answers
        seed: seed of the adapter and the data
        offline: never download a base that is not on this machine

    Raises:
        ValueError: a number out of its range.
    """

    base: str = "smollm2"
    text: tuple[pathlib.Path, ...] = option((), several=True)
    rank: int = 32
    stretch: float = 1.0
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    tokens_per_step: int = 131072
    steps: int = 2000
    peak: float = 2e-3
    lm_weight: float = 1.0
    seed: int = 0
    offline: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "steps", "tokens_per_step"):
            if (value := vars(self)[name]) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not self.stretch >= 1:
            raise ValueError(f"stretch must be at least 1, got {self.stretch}")
        if not self.lengths:
            raise ValueError("lengths must name at least one length, got none")
        if not 0 < self.peak < math.inf:
            raise ValueError(f"peak must be a positive number, got {self.peak}")
        if not 0 <= self.lm_weight < math.inf:
            raise ValueError(f"lm_weight must be at least 0, got {self.lm_weight}")


def _train(settings: AdapterSettings, command: TrainingCommand) -> None:
    # Imported here, because every data worker imports this module again, and no worker needs JAX.
    import models
    from experiments.answering import load_model
    from experiments.lab.training.course import Course
    from experiments.lab.training.mixture import chat_mixture
    from experiments.lab.training.subject import Adapter
    from experiments.lab.training.trainer import train

    base = load_model(settings.base, offline=settings.offline)
    template = models.ChatTemplate.from_directory(base.directory)
    if template is None:
        raise ValueError(f"{base.name} has no chat template, expected a model that answers in a chat")
    if not base.config.eos_token_ids:
        raise ValueError(f"{base.name} has no end-of-text token, expected an end-of-text token that closes answers")
    end_id = base.config.eos_token_ids[0]
    mixture = chat_mixture(template.around(), base.tokenizer.id_to_token(end_id), end_id, pad_id=end_id)
    subject = Adapter.of(base.name, base.params, base.config, settings.rank, settings.stretch)
    course = Course(
        settings.steps,
        settings.lengths,
        settings.tokens_per_step,
        mixture,
        peak=settings.peak,
        warmup=100,
        weight_decay=0.0,
        lm_weight=settings.lm_weight,
        lm_weight_first=settings.lm_weight,
        scored=4,
    )
    train(
        command.out,
        subject=subject,
        course=course,
        tokenizer=base.directory,
        texts=settings.text,
        minutes=command.limit,
        save_minutes=command.save_minutes,
        resume=command.resume,
        seed=settings.seed,
        workers=command.workers,
    )
    print(f"log: {command.out / 'train_log.jsonl'}; adapter: {command.out / 'export'}")


main = Job(_train, AdapterSettings, TrainingCommand, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
