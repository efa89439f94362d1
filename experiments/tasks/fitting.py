"""Fit documents to a length: as long as the limit allows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from experiments.tasks.base import Document, Request, TooShort


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


def fit(request: Request, build: Callable[[int], Document], fixed: int, room: int) -> Document:
    """Build a document whose first prompt fits `request.length`; the haystack shrinks until the prompt fits.

    In training the finished prompt is not counted here, because the loader of rows counts the tokens that it encodes.

    Args:
        request: the limit and the token counter.
        build: haystack tokens -> document.
        fixed: tokens of everything except the haystack, `room` included.
        room: tokens that are reserved for the answers.

    Raises:
        ValueError: the needles and the question alone are longer than `request.length`.
    """
    length = request.length
    budget = length - fixed
    if budget < 0:
        raise TooShort(f"length {length} is too short: the task needs {-budget} tokens more for its fixed parts")
    document = build(budget)
    while not request.training:
        sample = document.samples()[0]
        excess = request.count_tokens(sample.prompt) + room - length
        if excess <= 0:
            break
        budget -= excess
        if budget < 0:
            raise TooShort(f"length {length} is too short: the task needs {-budget} tokens more")
        document = build(budget)
    return document


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

    made = build(1)
    if (missing := excess(made)) > 0:
        raise TooShort(f"length {request.length} is too short: the task needs {missing} tokens more for a single step")
    least = 1
    while least < most:
        middle = (least + most + 1) // 2
        document = build(middle)
        if excess(document) > 0:
            most = middle - 1
        else:
            least, made = middle, document
    return made


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
