"""InfiniteBench (Zhang et al. 2024, arXiv:2402.13718): a jsonl file for each task.

Records are `id, context, input, answer, options`. Templates are the suite's `yarn_mistral_templates` for base models, which
other projects use too; they are in formats.json. The cue at the end of each template is
the answer prefix, so that it follows the assistant tag of a chat template.
"""

from __future__ import annotations

import re
from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.formats import task_formats
from experiments.benchmarks.records import Record, named_after, read_examples

TASKS = task_formats("infinitebench")
CHOICES = ("longbook_choice_eng", "code_debug")
KV_CUE = "\nThe value associated with the specified key is: "  # the field `input` of kv_retrieval ends with it


def option_texts(record: Record) -> dict[str, str]:
    """Return the four options under their names in the templates; ValueError if there are not four options."""
    options = record.texts("options")
    if len(options) != 4:
        raise record.error(f"expected 4 texts in the field 'options', got {len(options)}")
    return {f"OPTION_{letter}": text for letter, text in zip("ABCD", options, strict=True)}


def choice_answers(record: Record) -> tuple[str, str]:
    """Return the right option's text and its letter; ValueError if the answer is not among the options."""
    answers = record.texts("answer")
    if len(answers) == 2 and answers[1] in ("A", "B", "C", "D"):
        return answers[0], answers[1]
    options = record.texts("options")
    if len(answers) != 1 or answers[0] not in options:
        raise record.error(f"expected one of the options {options} in the field 'answer', got {answers}")
    return answers[0], "ABCD"[options.index(answers[0])]


def _phrase(record: Record, pattern: str, what: str) -> str:
    match = re.search(pattern, record.text("input"))
    if match is None:
        raise record.error(f"expected {what} in the field 'input', got {record.text('input')[:80]!r}")
    return match.group()


def _values(task: str, record: Record) -> dict[str, str]:
    """Collect the values that fill the task's template."""
    values = {"context": record.text("context"), "input": record.text("input")}
    if task in CHOICES:
        values |= option_texts(record)
    if task == "code_run":
        call = _phrase(record, r"func_[0-9]+\(-?[0-9]+\)", "a call like func_1(2)")
        values |= {"func": call.split("(")[0], "func_call": call}
    if task == "math_find":
        wanted = _phrase(record, r"The .+ of", "'The ... of'").lower().removesuffix(" of")
        values["prefix"] = f"What is {wanted} in the following list?"
    return values


def _answers(task: str, record: Record) -> tuple[str, ...]:
    if task in CHOICES:
        return choice_answers(record)
    if task == "math_calc":  # the file nests the list of values in a list
        nested = record.get("answer", list, "a list")
        inner = nested[0] if nested and isinstance(nested[0], list) else nested
        return Record(record.where, {"answer": inner}).texts("answer")
    return record.texts("answer", decimals=task == "math_find")  # 7 accepts 7.5, 7.0 does not


def read_infinitebench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of InfiniteBench.

    Args:
        path: the file, named after its task (`passkey.jsonl`).

    Raises:
        ValueError: the file or the task does not exist, or a line lacks the suite's form; the message names the file, the
            line, what was found and what was expected.
    """
    task = named_after(path, "InfiniteBench", TASKS)
    form = TASKS[task]

    def example(record: Record) -> Example:
        values = _values(task, record)
        question, prefix = form.question.format(**values), form.answer_prefix.format(**values)
        if task == "kv_retrieval" and question.endswith(KV_CUE):
            question, prefix = question.removesuffix(KV_CUE), KV_CUE
        context, answers = form.context.format(**values), _answers(task, record)
        return Example(task, context, question, prefix, answers, form.max_new_tokens, form.scorer)

    return read_examples(path, limit, example)
