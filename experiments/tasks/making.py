"""Make documents and samples of a task."""

from __future__ import annotations

import random
from collections.abc import Callable

from experiments.tasks.base import Document, Request, Sample
from experiments.tasks.code_files import RENAMED, Library
from experiments.tasks.haystack import Haystack, load_haystack
from experiments.tasks.qa_data import QaData, load_questions
from experiments.tasks.registry import get_task
from experiments.tasks.words import Words


def make_document(
    name: str,
    rng: random.Random,
    length: int,
    count_tokens: Callable[[str], int],
    haystack: Haystack | QaData | Library,
    words: Words,
    *,
    depth: float | None = None,
    num_questions: int = 1,
    training: bool = False,
    index: int | None = None,
) -> Document:
    """Make a context with its questions.

    Args:
        haystack: sentences to hide the needles in (unused by tasks that make their own), or the questions of a file; see
            `haystack_for`.
        words: keys and values of a split.
        depth: where the first queried needle goes, 0 (start) to 1 (end); None draws the depth.
        num_questions: number of questions about this context; more questions bring more needles.
        training: see `Request`.
        index: see `Request`.

    Raises:
        ValueError: the task is unknown, the depth lies outside [0, 1] or the task takes none, the number of questions is
            below 1 or above the task's limit, or the length is too short.
    """
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
    return task.generate(Request(rng, length, count_tokens, haystack, words, depth, num_questions, training, index))


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
        num_questions: number of questions about each context.
    """
    stack = haystack_for(name, haystack, count_tokens, split)
    words = Words(split)
    made = []
    drawn = name.removesuffix(RENAMED)  # a task with new names asks about the files that the task without them draws
    for index in range(count):
        rng = random.Random(f"{split}/{drawn}/{length}/{seed}/{index}")
        first = index * num_questions
        made.append(
            make_document(
                name, rng, length, count_tokens, stack, words, depth=depth, num_questions=num_questions, index=first
            )
        )
    return made


def make_samples(
    name: str,
    *,
    length: int,
    count: int,
    seed: int,
    count_tokens: Callable[[str], int],
    haystack: str | None = None,
    split: str = "eval",
    depth: float | None = None,
) -> list[Sample]:
    """Make `count` samples with a single question each.

    Sample i depends only on i and the arguments other than `count`.

    Args:
        haystack: see `make_documents`.
        split: "eval" (held-out keys, values and prose) or "train".
    """
    documents = make_documents(
        name,
        length=length,
        count=count,
        seed=seed,
        count_tokens=count_tokens,
        haystack=haystack,
        split=split,
        depth=depth,
    )
    return [document.samples()[0] for document in documents]


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
