"""Make documents and samples of a task."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from experiments.tasks.base import Document, Request, Sample
from experiments.tasks.code_files import RENAMED, Library
from experiments.tasks.haystack import Haystack, load_haystack
from experiments.tasks.qa_data import QaData, load_questions
from experiments.tasks.registry import get_task
from experiments.tasks.words import Words


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
    return task.generate(request)


def make_documents(
    name: str,
    *,
    length: int,
    count: int,
    seed: int,
    count_tokens: Callable[[str], int],
    haystack: str | None = None,
    split: str = "eval",
    depth: float | None = None,
    num_questions: int = 1,
) -> list[Document]:
    """Make `count` contexts with their questions.

    Document i depends only on i and the arguments other than `count`.

    Args:
        haystack: "noise", "prose", "code" or "file:PATH"; None takes the task's own kind. Tasks with questions from a file
            need "file:PATH"; document i asks the file's questions from the (i x num_questions)-th on.
        split: "eval" (held-out keys, values and prose) or "train".
        depth: see `Request`.
        num_questions: number of questions about each context.
    """
    stack, words = haystack_for(name, haystack, count_tokens, split), Words(split)
    drawn = name.removesuffix(RENAMED)  # a task with new names asks about the files that the task without them draws
    documents = []
    for index in range(count):
        rng = random.Random(f"{split}/{drawn}/{length}/{seed}/{index}")
        first = index * num_questions
        request = Request(name, rng, length, count_tokens, stack, words, depth, num_questions, index=first)
        documents.append(make_document(request))
    return documents


def make_samples(name: str, **options: Any) -> list[Sample]:
    """Make samples with a single question each; see `make_documents` for the options."""
    return [document.samples()[0] for document in make_documents(name, **options)]


def haystack_for(name: str, kind: str | None, count_tokens: Callable[[str], int], split: str) -> Haystack | QaData | Library:
    """Load the material that a task is made from: a haystack, the questions of a file, or files of code.

    Args:
        kind: "noise", "prose", "code" or "file:PATH"; None takes the suite's own kind (noise for tasks that make their own).
    """
    task = get_task(name)
    if task.load is not None:
        return task.load(count_tokens, split)
    if task.needs_file:
        return load_questions(task.haystack, kind, count_tokens)
    return load_haystack(kind or task.haystack or "noise", count_tokens, split)
