"""The tasks by name, and the functions that make documents and samples."""

from __future__ import annotations

import difflib
import functools
import random
from collections.abc import Callable, Sequence

from experiments.tasks import infinitebench, ruler
from experiments.tasks.base import (
    Document,
    Request,
    Sample,
    Task,
    score_all,
    score_first_integer,
    score_value_among_words,
)
from experiments.tasks.haystack import Haystack, load_haystack
from experiments.tasks.words import Words

TASKS: dict[str, Task] = {
    spec.name: Task(
        spec.name,
        functools.partial(ruler.niah, spec),
        score_all,
        "" if spec.haystack == "needles" else spec.haystack,
        ruler.NIAH_TOKENS,
    )
    for spec in ruler.NIAH_SPECS
}
TASKS["vt"] = Task("vt", ruler.variable_tracking, score_all, "noise", ruler.VT_TOKENS)
TASKS["passkey"] = Task("passkey", infinitebench.passkey, score_first_integer, "noise", infinitebench.PASSKEY_TOKENS)
TASKS["number_string"] = Task(
    "number_string", infinitebench.number_string, score_first_integer, "noise", infinitebench.NUMBER_STRING_TOKENS
)
TASKS["kv_retrieval"] = Task(
    "kv_retrieval", infinitebench.kv_retrieval, score_value_among_words, "", infinitebench.KV_TOKENS
)


def get_task(name: str) -> Task:
    """The task called `name`.

    Raises:
        ValueError: unknown name; the nearest known one is suggested.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown task {name!r}, did you mean {near!r}? expected one of {', '.join(TASKS)}")
    return TASKS[name]


def make_document(
    name: str,
    rng: random.Random,
    length: int,
    count_tokens: Callable[[str], int],
    haystack: Haystack,
    words: Words,
    *,
    depth: float | None = None,
    num_questions: int = 1,
    training: bool = False,
) -> Document:
    """Makes one context with its questions.

    Args:
        name: task name.
        rng: the only source of randomness.
        length: limit in tokens on context + questions + generated tokens.
        count_tokens: text -> number of tokens.
        haystack: sentences to hide the needles in (of the task's own kind, see `Task.haystack`; unused by tasks
            that make their own).
        words: keys and values of one split.
        depth: where the first queried needle goes, 0 (start) to 1 (end); random if None.
        num_questions: questions about this context; more questions bring more needles.
        training: reserve room for the targets (plus end-of-sequence) of all questions instead of the suite's
            generation length for one, and do not count the finished prompt again.

    Returns:
        The document.

    Raises:
        ValueError: unknown task, depth outside [0, 1], fewer than one question, or a length too short.
    """
    task = get_task(name)
    if depth is not None and not 0.0 <= depth <= 1.0:
        raise ValueError(f"depth must lie in [0, 1], got {depth}")
    if num_questions < 1:
        raise ValueError(f"num_questions must be at least 1, got {num_questions}")
    return task.generate(Request(rng, length, count_tokens, haystack, words, depth, num_questions, training))


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
    """Makes `count` single-question samples; sample i depends on (name, length, seed, i) only.

    Args:
        name: task name.
        length: limit in tokens on prompt + generated tokens.
        count: how many samples.
        seed: seed of the set.
        count_tokens: text -> number of tokens.
        haystack: "noise", "prose" or "file:PATH"; None takes the task's own kind.
        split: "eval" (held-out keys, values and prose) or "train".
        depth: see `make_document`.

    Returns:
        The samples.

    Raises:
        ValueError: see `make_document`.
    """
    stack = haystack_for(name, haystack, count_tokens, split)
    words = Words(split)
    made = []
    for index in range(count):
        rng = random.Random(f"{split}/{name}/{length}/{seed}/{index}")
        made += make_document(name, rng, length, count_tokens, stack, words, depth=depth).samples()[:1]
    return made


def haystack_for(name: str, kind: str | None, count_tokens: Callable[[str], int], split: str) -> Haystack:
    """The haystack a task uses: the given kind, or the suite's own (noise for tasks that make their own)."""
    return load_haystack(kind or get_task(name).haystack or "noise", count_tokens, split)


def score(name: str, prediction: str, answers: Sequence[str]) -> float:
    """Scores an output with the suite's own scorer.

    Args:
        name: task name.
        prediction: generated text.
        answers: references of the sample.

    Returns:
        Score in [0, 1].
    """
    return get_task(name).score(prediction, answers)
