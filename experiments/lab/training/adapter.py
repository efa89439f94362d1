"""Trains a low-rank adapter on the retrieval tasks: `python -m experiments.lab.training.adapter --out DIR [--text FILE ...]`.

The base stays as it is, and the adapter is a small file beside it (`models.files.adapter`). Rows are chats in the base's own
template, and prose, which the adapted model must still predict as the base does. Otherwise a run goes like a run of
`experiments.lab.training`: it saves, stops and resumes.
"""

from experiments.cli import Job
from experiments.lab.training.settings import AdapterSettings, TrainingCommand


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
        settings.steps, settings.lengths, settings.tokens_per_step, mixture, peak=settings.peak, warmup=100,
        weight_decay=0.0, lm_weight=settings.lm_weight, lm_weight_first=settings.lm_weight, scored=4,
    )  # fmt: skip
    course_of = {"subject": subject, "course": course, "seed": settings.seed}
    train(command.out, **course_of, texts=settings.text, tokenizer=base.directory, **command.options)
    print(f"log: {command.out / 'train_log.jsonl'}; adapter: {command.out / 'export'}")


main = Job(_train, AdapterSettings, TrainingCommand, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
