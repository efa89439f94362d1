"""The suites' templates, generation lengths and scorers by task, which are data: formats.json."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json


@dataclasses.dataclass(frozen=True)
class TaskFormat:
    """A task's template in three parts, its generation length and its scorer."""

    max_new_tokens: int
    scorer: str
    context: str = "{context}"
    question: str = "\n\n{input}"
    answer_prefix: str = ""


def task_formats(suite: str) -> dict[str, TaskFormat]:
    """Read the formats of a suite's tasks, "infinitebench" or "scbench"."""
    text = (importlib.resources.files(__package__) / "formats.json").read_text(encoding="utf-8")
    return {task: TaskFormat(**form) for task, form in json.loads(text)[suite]["tasks"].items()}
