"""Fit documents to a length: as long as the limit allows."""

import contextlib
import random
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


def spread(rng: random.Random, others: Sequence[str], mine: Sequence[str]) -> list[str]:
    """Insert texts in their order at random places among others."""
    return insert(list(others), list(mine), sorted(rng.randrange(len(others) + 1) for _ in mine))


def draw_until_full[Drawn](draw: Callable[[], Drawn], tokens: int, cost: Callable[[Drawn], int]) -> list[Drawn]:
    """Draw parts of a context until the next one would not fit into some tokens; ``cost`` counts the tokens of a part."""
    parts: list[Drawn] = []
    while tokens > 0:
        part = draw()
        tokens -= cost(part)
        if tokens >= 0:
            parts.append(part)
    return parts


def fit(
    request: Request,
    questions: Sequence[Question],
    fixed: int,
    build: Callable[[int], str],
    limit: int | None = None,
    system: str = "",
) -> Document:
    """Make a document whose first prompt fits `request.length`; the haystack shrinks until the prompt fits.

    Args:
        request: the limit and the token counter.
        questions: about the context.
        fixed: tokens of the context without the haystack, and of the system turn.
        build: haystack tokens -> context.
        limit: most tokens of an answer; None takes the prompt's.
        system: text of the system turn.

    Raises:
        TooShort: the needles and the question alone are longer than `request.length`.
    """
    limit = request.prompt.tokens if limit is None else limit
    budget = request.length - fixed - limit - request.question_tokens(questions)
    while True:
        if budget < 0:
            raise TooShort(f"length {request.length} is too short: the task needs {-budget} tokens more")
        document = Document(request.task, build(budget), tuple(questions), limit, system)
        excess = request.count_tokens(document.samples()[0].prompt) + limit - request.length
        if excess <= 0:
            return document
        budget -= excess


def fit_among(
    request: Request,
    questions: Sequence[Question],
    asked: Sequence[str],
    others: Callable[[int], Sequence[str]],
    cost: Callable[[str], int],
    join: Callable[[Sequence[str]], str],
) -> Document:
    """Make a document whose context has the parts that are asked about at random places among other parts.

    Args:
        request: its depth, if it has one, is the place of the first part that is asked about.
        questions: about the context.
        asked: the parts that are asked about.
        others: tokens -> other parts that fill them.
        cost: part -> its tokens.
        join: parts -> the text that fills the prompt's place ``{context}``.
    """

    def build(budget: int) -> str:
        parts = list(others(budget))
        number = len(parts)
        for index, part in enumerate(asked):
            chosen = request.depth is not None and index == 0
            parts.insert(round(request.depth * number) if chosen else request.rng.randrange(len(parts) + 1), part)
        return request.prompt.context.format(context=join(parts))

    fixed = request.count_tokens(request.prompt.context.format(context=join([]))) + sum(map(cost, asked))
    return fit(request, questions, fixed, build)


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
        return request.count_tokens(document.samples()[0].prompt) + document.max_new_tokens - request.length

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
