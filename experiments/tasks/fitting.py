"""Fit documents to a length: as long as the limit allows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from experiments.tasks.base import Document, Question, Request, TooShort


def insert(sentences: list[str], needles: list[str], positions: list[int]) -> list[str]:
    """Insert needle i before sentence `positions[i]`; needles with equal positions keep their order."""
    order = sorted(range(len(needles)), key=positions.__getitem__)
    merged: list[str] = []
    start = 0
    for index in order:
        merged += sentences[start : positions[index]]
        merged.append(needles[index])
        start = positions[index]
    return merged + sentences[start:]


def draw_until_full[Drawn](draw: Callable[[], Drawn], tokens: int, cost: Callable[[Drawn], int]) -> list[Drawn]:
    """Draw parts of a context until the next one would not fit into some tokens; ``cost`` counts the tokens of a part."""
    parts: list[Drawn] = []
    while tokens > 0:
        part = draw()
        tokens -= cost(part)
        if tokens >= 0:
            parts.append(part)
    return parts


def mix(request: Request, others: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Insert each text at a random place among the others, but the first at the request's depth if it has one."""
    merged = list(others)
    for index, text in enumerate(texts):
        chosen = request.depth is not None and index == 0
        merged.insert(round(request.depth * len(others)) if chosen else request.rng.randrange(len(merged) + 1), text)
    return merged


def fit(
    request: Request, questions: Sequence[Question], limit: int, fixed: int, build: Callable[[int], str], system: str = ""
) -> Document:
    """Make a document whose first prompt fits `request.length`; the haystack shrinks until the prompt fits.

    In training the finished prompt is not counted here, because the loader of rows counts the tokens that it encodes.

    Args:
        request: the limit and the token counter.
        questions: about the context.
        limit: most tokens of an answer.
        fixed: tokens of the context without the haystack, and of the system turn.
        build: haystack tokens -> context.
        system: text of the system turn.

    Raises:
        TooShort: the needles and the question alone are longer than `request.length`.
    """
    room = request.answer_room(questions, limit)
    budget = request.length - fixed - room - request.question_tokens(questions)
    while True:
        if budget < 0:
            raise TooShort(f"length {request.length} is too short: the task needs {-budget} tokens more")
        document = Document(request.task, build(budget), tuple(questions), limit, system)
        excess = 0 if request.training else request.count_tokens(document.samples()[0].prompt) + room - request.length
        if excess <= 0:
            return document
        budget -= excess


def fit_steps(request: Request, build: Callable[[int], Document], most: int) -> Document:
    """Build the document of the most steps whose prompt and answers fit `request.length`.

    Args:
        request: the limit and the token counter.
        build: number of steps, at least 1 -> document; more steps make a longer document.
        most: the most steps to try.

    Raises:
        TooShort: a single step does not fit.
    """

    def excess(document: Document) -> int:
        sample = document.samples()[0]
        room = request.answer_room(document.questions, document.max_new_tokens)
        asked = request.question_tokens(document.questions) if request.training else 0
        prompt = request.count_tokens(sample.opening if request.training else sample.prompt)
        return prompt + asked + room - request.length

    longest = build(1)
    if (missing := excess(longest)) > 0:
        raise TooShort(f"length {request.length} is too short: the task needs {missing} tokens more for a single step")
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        document = build(middle)
        if excess(document) > 0:
            most = middle - 1
        else:
            least, longest = middle, document
    return longest


@contextlib.contextmanager
def length_within(length: int, template: int) -> Iterator[int]:
    """Yield the tokens that a chat template leaves of a length; name the template if they are too few for what is made.

    Args:
        length: tokens of the whole.
        template: tokens of the template, system message included; 0 without a template.

    Raises:
        ValueError: the template fills the length, or the block raises `TooShort`.
    """
    takes = f"the chat template and the system message in it take {template} of the length of {length} tokens"
    if template >= length:
        raise ValueError(f"{takes}, expected fewer")
    try:
        yield length - template
    except TooShort as error:
        raise ValueError(f"{error}; {takes}" if template else str(error)) from error
