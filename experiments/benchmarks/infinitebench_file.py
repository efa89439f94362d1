"""InfiniteBench (Zhang et al. 2024, arXiv:2402.13718): a jsonl file for each task.

Records are `id, context, input, answer, options`. Templates are the suite's `yarn_mistral_templates` for base models
(OpenBMB/InfiniteBench @88b3daa, `src/prompt.py`, MIT), which other projects use too. The cue at the end of each template is
the answer prefix, so that it follows the assistant tag of a chat template.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.records import Record, read_jsonl


@dataclasses.dataclass(frozen=True)
class TaskFormat:
    """A task's template in three parts, its generation length and its scorer."""

    context: str
    question: str
    answer_prefix: str
    max_new_tokens: int
    scorer: str


OPTIONS = "A. {OPTION_A}\nB. {OPTION_B}\nC. {OPTION_C}\nD. {OPTION_D}"
TASKS: dict[str, TaskFormat] = {
    "passkey": TaskFormat(
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
        "I will quiz you about the important information.\n\n{context}",
        "\n\n{input}",
        "\n\nThe pass key is",
        6,
        "infinitebench_first_integer",
    ),
    "number_string": TaskFormat(
        "There is an important info hidden inside a lot of irrelevant text. Find it. "
        "I will quiz you about the important information there.\n\n{context}",
        "\n\n{input}",
        "\n\nThe sequence of digits is",
        12,
        "infinitebench_first_integer",
    ),
    "kv_retrieval": TaskFormat(
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{context}",
        "\n\n{input}",
        "",
        50,
        "infinitebench_kv",
    ),
    "longbook_sum_eng": TaskFormat(
        "Summarize the book below.\n\n{context}", "", "\n\nSummary:", 1200, "infinitebench_summary"
    ),
    "longbook_choice_eng": TaskFormat(
        "Read the book and answer the question.\n\n{context}",
        "\n\nQuestion: {input}\n" + OPTIONS,
        "\n\nThe letter of the correct answer is",
        40,
        "infinitebench_choice",
    ),
    "longbook_qa_eng": TaskFormat(
        "Read the book and answer the question. Be very concise in your answer.\n\n{context}",
        "\n\nQuestion: {input}",
        "\nAnswer:",
        40,
        "infinitebench_f1",
    ),
    "longbook_qa_chn": TaskFormat(
        "阅读以下书籍然后回答问题。\n\n{context}", "\n\n问题：{input}", "\n答案：", 40, "infinitebench_f1_zh"
    ),
    "longdialogue_qa_eng": TaskFormat(
        'Below is a dialogue script where one random occurrence of a character name is replaced with "$$MASK$$", '
        "and you should try to guess who that character is.\n\n{context}",
        "",
        "\n\nThe name that has been replaced with $$MASK$$ is likely",
        40,
        "infinitebench_dialogue",
    ),
    "math_find": TaskFormat("{prefix}\n\n{context}", "\n\n{input}", "", 3, "infinitebench_math_find"),
    "math_calc": TaskFormat(
        "Let us calculate the intermediate values of an expression.\n\nExpression: 1 + 3 + 4\nValues: [1, 4, 8]\n\n"
        "Expression: 8 - 3 + 2 - 4\nValues: [8, 5, 7, 3]\n\nExpression: {context}",
        "",
        "\nValues:",
        30000,
        "infinitebench_math_calc",
    ),
    "code_run": TaskFormat(
        "There is a function called {func} in the following Python code.\n\n{context}",
        "\n\nPlease compute the exact value of {func_call}.",
        " The value of {func_call} is",
        5,
        "infinitebench_code_run",
    ),
    "code_debug": TaskFormat(
        "Following is a Python code where exactly one of the functions/methods has a deliberate error "
        "that makes it crash.\n\n{context}",
        "\n\nOptions:\n" + OPTIONS,
        "\n\nThe correct option is:",
        5,
        "infinitebench_code_debug",
    ),
}
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
    found = re.search(pattern, record.text("input"))
    if found is None:
        raise record.error(f"expected {what} in the field 'input', got {record.text('input')[:80]!r}")
    return found.group()


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


def task_of(path: Path) -> str:
    """Return the task that a file is named after; ValueError if no task has the file's name."""
    if path.stem not in TASKS:
        near = difflib.get_close_matches(path.stem, TASKS, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{path}: expected a file named after an InfiniteBench task, got {path.stem!r}, did you mean {near!r}? "
            f"expected one of {', '.join(TASKS)}"
        )
    return path.stem


def read_infinitebench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of InfiniteBench.

    Args:
        path: the file, named after its task (`passkey.jsonl`).

    Raises:
        ValueError: the file or the task does not exist, or a line lacks the suite's form; the message names the file, the
            line, what was found and what was expected.
    """
    task = task_of(path)
    form = TASKS[task]
    examples = []
    for record in read_jsonl(path, limit):
        values = _values(task, record)
        question, prefix = form.question.format(**values), form.answer_prefix.format(**values)
        if task == "kv_retrieval" and question.endswith(KV_CUE):
            question, prefix = question.removesuffix(KV_CUE), KV_CUE
        example = Example(
            task=task,
            context=form.context.format(**values),
            question=question,
            answer_prefix=prefix,
            answers=_answers(task, record),
            max_new_tokens=form.max_new_tokens,
            scorer=form.scorer,
        )
        examples.append(record.fitted(example))
    return examples
