"""The tasks by name, groups of tasks, and the documents and examples of a task.

A new task is a section of tasks.toml and a row of `_KINDS`: the function that draws it, and the function that scores it.
"""

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from experiments.tasks import dialogues, file_turns, lists, procedures, qa, ruler, rules, scorers, word_problems
from experiments.tasks.associations import LITERAL, association
from experiments.tasks.base import DESCRIPTIONS, PROMPTS, Document, Example, Request, Task, TooShort, check_name
from experiments.tasks.code_completion import code_completion
from experiments.tasks.code_files import KIND, RENAMED, Library
from experiments.tasks.code_recall import code_recall, score_code_answer
from experiments.tasks.entries import entries
from experiments.tasks.happenings import happenings
from experiments.tasks.haystack import Haystack, load_haystack
from experiments.tasks.words import Words

_STEPS = {"measures": {"result": procedures.score_result}}
_LINES = {"measures": {"prefix": procedures.score_steps, "result": procedures.score_result}}
_SHEET = {"measures": {"answered": word_problems.score_answered}}
_NOTE = {"measures": {"secret_kept": rules.score_secret}}

# For each section of tasks.toml: what draws the document, what scores an answer, and what else belongs to the task.
_KINDS: dict[str, tuple[Callable[..., Document], Callable[[str, Sequence[str]], float], dict[str, Any]]] = {
    "niah": (ruler.niah, scorers.score_all, {}),
    "vt": (ruler.variable_tracking, scorers.score_all, {}),
    "cwe": (ruler.common_words, scorers.score_all, {}),
    "fwe": (ruler.frequent_words, scorers.score_all, {}),
    "qa": (qa.qa, scorers.score_any, {}),
    "passkey": (lists.hidden_number, scorers.score_first_integer, {}),
    "number_string": (lists.hidden_number, scorers.score_first_integer, {}),
    "kv_retrieval": (lists.kv_retrieval, scorers.score_value_among_words, {}),
    "math_find": (lists.math_find, scorers.score_first_number, {}),
    "prefix_suffix": (lists.prefix_suffix, scorers.score_value_among_words, {}),
    "many_shot": (lists.many_shot, scorers.score_first_word, {}),
    "listing": (lists.listing, scorers.score_in_order, {}),
    "code_completion": (
        code_completion,
        scorers.score_next_line,
        {"load": Library, "measures": {"exact_match": scorers.score_exact_line}},
    ),
    "code_recall": (code_recall, score_code_answer, {"load": Library}),
    "merge": (procedures.merge, procedures.score_steps, _STEPS),
    "table": (procedures.table, procedures.score_steps, _STEPS),
    "walk": (procedures.walk, procedures.score_steps, _STEPS),
    "ledger": (procedures.ledger, procedures.score_steps, _STEPS),
    "merge_1": (procedures.merge_lists, procedures.score_lines, _LINES),
    "merge_2": (procedures.merge_lists, procedures.score_lines, _LINES),
    "cells": (procedures.table, procedures.score_lines, _LINES),
    "circle": (procedures.circle, procedures.score_edges, _LINES),
    "bookings": (procedures.bookings, procedures.score_sums, _LINES),
    "lookup": (procedures.lookup, procedures.score_lines, _LINES),
    "word_problems_1": (word_problems.word_problems, word_problems.score_problems, _SHEET),
    "word_problems": (word_problems.word_problems, word_problems.score_problems, _SHEET),
    "rules": (rules.rules, rules.score_rules, _NOTE),
    "easy_rules": (rules.easy_rules, rules.score_rules, _NOTE),
    "file_turns_1": (file_turns.file_turns_1, scorers.score_value_among_words, {}),
    "file_turns": (file_turns.file_turns, scorers.score_value_among_words, {}),
    "association": (association, scorers.score_conclusion, {}),
    "entries": (entries, scorers.score_conclusion, {}),
    "near_duplicates": (dialogues.near_duplicates, scorers.score_leading_words, {}),
    "corrections": (dialogues.corrections, scorers.score_conclusion, {}),
    "happenings": (happenings, scorers.score_conclusion, {}),
}
_OF_TASKS = ("about", "haystack", "takes_depth", "max_questions", "chat", "in_turns", "chance")
_OF_PROMPTS = ("kind", *vars(PROMPTS["vt"]))


def _task(name: str) -> Task:
    said = DESCRIPTIONS[name]
    generate, score, more = _KINDS[said["kind"]]
    options = {field: value for field, value in said.items() if field not in (*_OF_TASKS, *_OF_PROMPTS)}
    fields = {field: said[field] for field in _OF_TASKS if field in said}
    return Task(name, functools.partial(generate, **options), score, PROMPTS[name].tokens, **fields, **more)


TASKS: dict[str, Task] = {name: _task(name) for name in DESCRIPTIONS}


def _of(*kinds: str) -> tuple[str, ...]:
    return tuple(name for name, said in DESCRIPTIONS.items() if said["kind"] in kinds)


_PROCEDURES = _of("merge", "table", "walk", "ledger")
_EASY = _of("merge_1", "merge_2", "cells", "circle", "bookings", "lookup")
_LONG = (*_PROCEDURES, *_EASY, *_of("word_problems_1", "word_problems", "rules", "easy_rules", "file_turns_1", "file_turns"))
_UNDERSTANDING = _of("association", "entries", "near_duplicates", "corrections", "happenings")
_CODE = _of("code_completion", "code_recall")
# "trained" has the order of the shipped model's training rows: new tasks never join it.
GROUPS: dict[str, tuple[str, ...]] = {
    "ruler": _of("niah", "vt", "cwe", "fwe", "qa"),
    "infinitebench": ("passkey", "number_string", "kv_retrieval", "math_find"),
    "shared": ("kv_retrieval", "prefix_suffix", "vt", "many_shot", "math_find"),
    "trained": _of("niah", "vt", "passkey", "number_string", "kv_retrieval"),
    "code": _CODE,
    "long": _LONG,
    "procedures": _PROCEDURES,
    "easy_procedures": _EASY,
    "rules": _of("rules"),
    "easy_rules": _of("easy_rules"),
    "understanding": _UNDERSTANDING,
    "literal": tuple(name for name in _of("association") if name.endswith(LITERAL)),
    "paraphrased": tuple(name for name in _of("association") if not name.endswith(LITERAL)),
    "logs": _of("entries"),
    "dialogues": _of("near_duplicates", "corrections"),
    "events": _of("happenings"),
    "generated": tuple(
        name for name, task in TASKS.items() if name not in (*_CODE, *_LONG, *_UNDERSTANDING) and not task.needs_file
    ),
    "all": tuple(TASKS),
}


def expand(names: Iterable[str]) -> tuple[str, ...]:
    """Replace the names of groups by the names of their tasks.

    Returns:
        The tasks in the order named, without repeats.

    Raises:
        ValueError: a name is neither a task nor a group; the message names the nearest known name.
    """
    expanded: dict[str, None] = {}
    for name in names:
        check_name("task", name, (*TASKS, *GROUPS))
        expanded.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return tuple(expanded)


def get_task(name: str) -> Task:
    """Return the task called `name`."""
    check_name("task", name, TASKS)
    return TASKS[name]


def reads_library(name: str, haystack: str | None) -> bool:
    """Tell whether a task's text comes from Python's standard library, so that a result records `library_origin`.

    Args:
        name: the task.
        haystack: kind; None takes the task's own.
    """
    task = get_task(name)
    return task.load is not None or (haystack or task.haystack) == KIND


def score(name: str, prediction: str, answers: Sequence[str]) -> float:
    """Score an output with the suite's own scorer."""
    return get_task(name).score(prediction, answers)


def make_document(request: Request) -> Document:
    """Make a context with its questions.

    Raises:
        ValueError: the task is unknown, the depth lies outside [0, 1] or the task takes none, the number of questions is
            below 1 or above the task's limit, or the length is too short.
    """
    name, depth, num_questions = request.task, request.depth, request.num_questions
    task = get_task(name)
    if depth is not None and not task.takes_depth:
        raise ValueError(f"{name} takes no depth, because no single place holds its answer; got {depth}")
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must lie in [0, 1], got {depth}")
    if num_questions < 1:
        raise ValueError(f"num_questions must be at least 1, got {num_questions}")
    if task.max_questions is not None and num_questions > task.max_questions:
        most = "one question" if task.max_questions == 1 else f"at most {task.max_questions} questions"
        raise ValueError(f"{name} takes {most} about a context, got num_questions {num_questions}")
    try:
        return task.generate(request)
    except TooShort as error:
        raise TooShort(f"{name}: {error}") from error


def make_documents(
    name: str,
    *,
    length: int,
    count: int,
    seed: int,
    count_tokens: Callable[[str], int],
    haystack: str | None = None,
    depth: float | None = None,
    num_questions: int = 1,
) -> list[Document]:
    """Make `count` contexts with their questions.

    Document i depends only on i and the arguments other than `count`.

    Args:
        name: the task.
        length: tokens of a context, a question and its answer.
        count: number of contexts.
        seed: another seed gives other contexts.
        count_tokens: text -> number of tokens.
        haystack: "noise", "prose", "code" or "file:PATH"; None takes the task's own kind. Tasks with questions from a file
            need "file:PATH"; document i asks the file's questions from the (i x num_questions)-th on.
        depth: see `Request`.
        num_questions: number of questions about each context.
    """
    stack, words = haystack_for(name, haystack, count_tokens), Words()
    drawn = name.removesuffix(RENAMED).removesuffix(LITERAL)  # a twin draws what the task without the ending draws
    documents = []
    for index in range(count):
        rng = random.Random(f"eval/{drawn}/{length}/{seed}/{index}")
        first = index * num_questions
        request = Request(name, rng, length, count_tokens, stack, words, depth, num_questions, index=first)
        documents.append(make_document(request))
    return documents


def make_samples(name: str, **options: Any) -> list[Example]:
    """Make examples with a single question each; see `make_documents` for the options."""
    return [document.samples()[0] for document in make_documents(name, **options)]


def haystack_for(name: str, kind: str | None, count_tokens: Callable[[str], int]) -> Haystack | qa.QaData | Library:
    """Load the material that a task is made from: a haystack, the questions of a file, or files of code.

    Args:
        name: the task.
        kind: "noise", "prose", "code" or "file:PATH"; None takes the suite's own kind (noise for tasks that make their own).
        count_tokens: text -> number of tokens.
    """
    task = get_task(name)
    if task.load is not None:
        return task.load(count_tokens)
    if task.needs_file:
        return qa.load_questions(task.haystack, kind, count_tokens)
    return load_haystack(kind or task.haystack or "noise", count_tokens)
