"""The tasks of real code, which read the running Python's standard library; see docs/real_text.md."""

from __future__ import annotations

import functools

from experiments.tasks import code_completion, code_files, code_recall, scorers
from experiments.tasks.base import Task


def _completion(name: str, new_names: bool, about: str) -> Task:
    return Task(
        name,
        functools.partial(code_completion.code_completion, name, new_names),
        scorers.score_next_line,
        "",
        code_completion.COMPLETION_TOKENS,
        takes_depth=False,
        max_questions=1,
        about=about,
        load=code_files.load_library,
        chat=False,
        measures={"exact_match": scorers.score_exact_line},
    )


def _recall(name: str, new_names: bool, about: str) -> Task:
    return Task(
        name,
        functools.partial(code_recall.code_recall, name, new_names),
        code_recall.score_code_answer,
        "",
        code_recall.RECALL_TOKENS,
        about=about,
        load=code_files.load_library,
    )


CODE_TASKS = (
    _completion("code_completion", False, "the next line of a file of Python's standard library, behind other files"),
    _completion("code_completion_renamed", True, "the same with new identifiers, which no model can know by heart"),
    _recall(
        "code_recall", False, "parameters, a default, the exception or the return annotation of a function far above"
    ),
    _recall("code_recall_renamed", True, "the same with new identifiers, which no model can know by heart"),
)
