"""Examples from the generators of `experiments.tasks`, and the score of any example."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from experiments.benchmarks import harness, scorers
from experiments.tasks import TASKS, Example, get_task, make_documents


def examples(
    name: str,
    *,
    length: int,
    count: int,
    seed: int,
    count_tokens: Callable[[str], int],
    haystack: str | None = None,
    depth: float | None = None,
    questions: int = 1,
) -> list[Example]:
    """Generate held-out contexts of a task with their questions.

    Context i depends only on the task's name, the length, the seed, i and the depth.

    Args:
        length: tokens of a context, a question and its answer.
        haystack: "noise", "prose", "code" or "file:PATH"; None takes the task's own kind.
        depth: where the first needle goes, 0 (start) to 1 (end); None draws the depth.
        questions: number of questions about each context.

    Returns:
        The examples. Several questions about a context follow each other and share a group.
    """
    documents = make_documents(
        name,
        length=length,
        count=count,
        seed=seed,
        count_tokens=count_tokens,
        haystack=haystack,
        depth=depth,
        num_questions=questions,
    )
    every, chat = [], get_task(name).chat
    for index, document in enumerate(documents):
        samples, about = document.samples()[:questions], {} if depth is None else {"depth": depth}
        if len(samples) == 1:
            every.append(dataclasses.replace(samples[0], chat=chat, labels=about))
            continue
        every += [
            dataclasses.replace(sample, chat=chat, group=f"{name}/{index}", labels=about | {"turn": turn})
            for turn, sample in enumerate(samples)
        ]
    return every


def score(example: Example, prediction: str) -> float:
    """Score an answer as the example's suite does, in [0, 1]."""
    if example.scorer in TASKS:
        return get_task(example.scorer).score(prediction, example.answers)
    return scorers.score(example, prediction)


def measures(example: Example, prediction: str) -> dict[str, float]:
    """Score an answer by the further measures of its task or scorer, each in [0, 1]; {} for tasks without."""
    if example.scorer not in TASKS:
        return dict(harness.results(prediction, example)) if example.scorer == "lm-eval" else {}
    more = get_task(example.scorer).measures
    return {name: measure(prediction, example.answers) for name, measure in more.items()}
