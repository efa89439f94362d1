"""SCBench (Li et al. 2024, arXiv:2412.10319): a jsonl file for each task, with several questions about each context.

Templates are the suite's multi-turn templates, in formats.json. Every question
has its first-turn form, so that a context is prefilled once and each question can be asked of a copy of the cache.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.formats import TaskFormat, task_formats
from experiments.benchmarks.infinitebench_file import choice_answers, option_texts
from experiments.benchmarks.records import Record, named_after, read_jsonl

TASKS = task_formats("scbench")
# In these files a turn's field `task` names the turn's task. The generation lengths differ from the lengths in other files.
MIXED: dict[str, dict[str, int]] = {
    "scbench_summary_with_needles": {"scbench_summary": 800, "scbench_passkey": 15},
    "scbench_repoqa_and_kv": {"scbench_repoqa": 1024, "scbench_kv": 80},
}


def _turns(record: Record) -> list[Record]:
    """Return the questions of a line; each question has its own position for messages."""
    turns = record.get("multi_turns", list, "a list of questions")
    if not turns:
        raise record.error("expected at least one question in 'multi_turns', got none")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise record.error(f"expected an object in 'multi_turns', got {type(turn).__name__} as number {number}")
    return [Record(f"{record.where}, turn {number}", turn) for number, turn in enumerate(turns, 1)]


def _named_number(turn: Record) -> str:
    """Form the question that `scbench_mf` asks first: "What is the ...?", from "The ... is" in the turn's input."""
    match = re.search(r"The .+ is", turn.text("input"))
    if match is None:
        raise turn.error(f"expected 'The ... is' in the field 'input', got {turn.text('input')[:80]!r}")
    return f"What is {match.group().lower().removesuffix(' is')}?"


def _texts(file_task: str, turns: Sequence[Record], context: str) -> tuple[str, list[str]]:
    """Format the context that all questions share, and the questions."""
    form = TASKS.get(file_task, TaskFormat(0, ""))  # mixed files have only the input
    context = form.context.format(context=context)
    questions = []
    for turn in turns:
        options = option_texts(turn) if file_task == "scbench_choice_eng" else {}
        questions.append(form.question.format(input=turn.text("input"), **options))
    if file_task == "scbench_mf":  # the number is named before the context and before every later question
        context = f"{_named_number(turns[0])}\n\n{context}"
        later = [f"\n\n{_named_number(turn)}{text}" for turn, text in zip(turns[1:], questions[1:], strict=True)]
        questions = [questions[0], *later]
    return context, questions


def _task_of_turn(file_task: str, turn: Record) -> tuple[str, TaskFormat]:
    """Return the name in tables and the format of a question."""
    if file_task not in MIXED:
        return file_task, TASKS[file_task]
    task, lengths = turn.text("task"), MIXED[file_task]
    if task not in lengths:
        raise turn.error(f"expected one of {tuple(lengths)} in the field 'task', got {task!r}")
    return f"{file_task}.{task}", dataclasses.replace(TASKS[task], max_new_tokens=lengths[task])


def read_scbench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of SCBench.

    Args:
        path: the file, named after its task (`scbench_kv.jsonl`). Records have `id, context, multi_turns`; repoqa's records
            also have `repo`. Turns have `input, answer`, and also `options` (choice) or `task` (mixed files).
        limit: most lines to read; each line is a context with its questions.

    Raises:
        ValueError: the file or the task does not exist, or a line lacks the suite's form; the message names the file, the
            line, what was found and what was expected.
    """
    file_task = named_after(path, "SCBench", (*TASKS, *MIXED))
    functions: dict[str, dict[str, None]] = collections.defaultdict(dict)  # repository -> functions in the whole file
    asked: list[tuple[Record, Example, str]] = []
    times: collections.Counter[str] = collections.Counter()
    for record in read_jsonl(path, limit):
        turns = _turns(record)
        context, questions = _texts(file_task, turns, record.text("context"))
        name = f"{file_task}/{record.texts('id')[0]}"
        times[name] += 1
        # Two lines of one id are two contexts: in one group, the second line's questions would be asked about the first.
        about = {"group": name if times[name] == 1 else f"{name}#{times[name]}"}
        for number, (turn, question) in enumerate(zip(turns, questions, strict=True)):
            task, form = _task_of_turn(file_task, turn)
            decimals = form.scorer == "infinitebench_math_find"
            answers = choice_answers(turn) if file_task == "scbench_choice_eng" else turn.texts("answer", decimals=decimals)
            labels = {"turn": number}
            example = Example(task, context, question, "", answers, form.max_new_tokens, form.scorer, labels=labels, **about)
            repository = record.text("repo") if form.scorer == "scbench_repoqa" else ""
            if repository:
                functions[repository][example.answers[0]] = None
            asked.append((turn, example, repository))
    return [
        turn.fitted(dataclasses.replace(example, classes=tuple(functions[repository])) if repository else example)
        for turn, example, repository in asked
    ]
