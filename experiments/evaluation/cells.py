"""The cells that an evaluation answers: a task at a length, or a file's examples of one task."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

import models
from experiments.answering import check_system
from experiments.benchmarks import Cell, Example, Reading, files_of, parse, read
from experiments.evaluation.settings import EvaluationSettings
from experiments.tasks import expand, get_task

_SYSTEM = "Here stands the text of the system."


def make_cells(settings: EvaluationSettings) -> list[Cell]:
    """Make the cells of the settings in the order of the tasks; read the files.

    A group's tasks that need a file are left out if the file is not given. Depths are left out for tasks that take none.

    Raises:
        ValueError: there is no cell.
    """
    cells = []
    for spec in settings.tasks:
        if spec in settings.files:
            by_task: dict[str, list[Example]] = {}
            name, path = parse(spec)
            for file in files_of(name, path):
                for example in _contexts(read(f"{name}:{file}"), settings.samples):
                    by_task.setdefault(example.task, []).append(example)
            cells += [Cell(task, None, settings.samples, source=spec, given=tuple(x)) for task, x in by_task.items()]
            continue
        for length in settings.lengths:
            for name in expand((spec,)):
                kind, task = settings.haystack_of(name), get_task(name)
                if task.needs_file and kind is None:  # the task came with a group, and its file is not given
                    continue
                questions = min(settings.questions, task.max_questions or settings.questions)
                for depth in (settings.depths if task.takes_depth else ()) or (None,):
                    cells.append(Cell(name, length, settings.samples, settings.seed, kind, depth, questions))
    if not cells:
        raise ValueError(f"expected tasks and lengths, got {settings.tasks} and {settings.lengths}")
    return list({tuple(cell.identity.values()): cell for cell in cells}.values())


def make_reading(
    settings: EvaluationSettings,
    tokenizer_file: pathlib.Path,
    template: models.ChatTemplate | None,
    limit: int,
    ends: Sequence[int] = (),
) -> Reading:
    """Say how the texts of the settings' cells become tokens.

    Args:
        tokenizer_file: tokenizer.json of the model.
        template: the model's chat template; None puts no template around the texts.
        limit: most tokens of prompt and answer that the model takes.
        ends: token ids that end an answer; in turns the cache holds such a token behind each answer.

    Raises:
        ValueError: the settings have a system turn, and there is no template.
    """
    reading = Reading(tokenizer_file, None, limit, settings.truncation, settings.max_new_tokens)
    check_system(template, settings.system)
    if template is None:
        return reading
    around, again = template.around(settings.system, **settings.template_variables), ""
    if settings.question == "turns":
        again = template.between(settings.system, **settings.template_variables)
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        for token in filter(None, map(tokenizer.id_to_token, ends)):
            again = again.removeprefix(token)
    return dataclasses.replace(reading, around=around, around_system=_around_system(settings, template), again=again)


def _around_system(settings: EvaluationSettings, template: models.ChatTemplate) -> tuple[str, str] | None:
    """Return the texts around a system text, up to the user's content; None if the template has no system turn."""
    try:
        before, _ = template.around(_SYSTEM, **settings.template_variables)
    except ValueError:  # some templates refuse the role
        return None
    parts = before.split(_SYSTEM)
    return (parts[0], parts[1]) if len(parts) == 2 else None


def without_file(settings: EvaluationSettings) -> list[str]:
    """List the tasks that `make_cells` leaves out of groups, because they ask the questions of a file that is not given."""
    named = [name for spec in settings.generated for name in expand((spec,))]
    return [name for name in dict.fromkeys(named) if get_task(name).needs_file and settings.haystack_of(name) is None]


def _contexts(examples: Sequence[Example], count: int) -> list[Example]:
    """Select all questions about the first ``count`` contexts of each task, grouped by context."""
    by_context: dict[str, dict[Any, list[Example]]] = {}
    for index, example in enumerate(examples):
        by_context.setdefault(example.task, {}).setdefault(example.group or index, []).append(example)
    kept = (list(groups.values())[:count] for groups in by_context.values())
    return [example for groups in kept for group in groups for example in group]
