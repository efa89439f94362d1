"""InfiniteBench's math_find (Zhang et al. 2024, arXiv:2402.13718): a special number in a long list of integers.

Numbers, ranges and prompts are the suite's. A single question is asked in the suite's form, which names the wanted number
before the list and after it. Several questions share the list, and each has its own header after the list, like SCBench's
later turns. There is no split, because the numbers below 100 are too few to keep some of them for training.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics

from experiments.tasks.base import Document, Question, Request, TooShort
from experiments.tasks.fitting import draw_until_full, fit

MATH_TOKENS = 6  # the suite's 3 tokens assume that a number is a single token
MATH_MOST = 99  # numbers are 0 to 99
MATH_SHARE = 0.2  # the part of the range in which the largest and the smallest number fall
MATH_KINDS = (
    "largest number",
    "second largest number",
    "third largest number",
    "smallest number",
    "second smallest number",
    "third smallest number",
    "median number",
)
MATH_HEADER = "What is the {kind} in the following list?"
MATH_QUESTION = "\n\nYou should answer with only one number, no other words."
MATH_PREFIX = " The {kind} of the list is: "
_RANKS = {"third": 3, "second": 2}


def special_number(kind: str, numbers: list[int]) -> str:
    """Return the number that is asked for, as text; except for the median, equal numbers count once.

    Args:
        kind: an item of `MATH_KINDS`.
        numbers: the list.

    Returns:
        The number; a median between two numbers ends in ".5".

    Raises:
        ValueError: the list has too few different numbers for the rank.
    """
    if kind == "median number":
        return f"{statistics.median(numbers):g}"
    rank = _RANKS.get(kind.split()[0], 1)
    ordered = sorted(set(numbers), reverse="largest" in kind)
    if len(ordered) < rank:
        raise ValueError(f"the list is too short: it has {len(ordered)} different numbers, the {kind} needs {rank}")
    return str(ordered[rank - 1])


def _bounds(rng: random.Random, kinds: list[str]) -> tuple[int, int]:
    """Draw the range of the numbers: the suite moves the end that is asked for, and a random end for the median."""
    sides = {"largest" if "largest" in kind else "smallest" for kind in kinds if "median" not in kind}
    sides = sides or {rng.choice(("largest", "smallest"))}
    low = rng.randint(0, int(MATH_MOST * MATH_SHARE)) if "smallest" in sides else 0
    high = rng.randint(int(MATH_MOST * (1 - MATH_SHARE)), MATH_MOST) if "largest" in sides else MATH_MOST
    return low, high


def math_find(request: Request) -> Document:
    """Build a list of integers; every question asks for another of `MATH_KINDS`."""
    rng, count_tokens = request.rng, request.count_tokens
    kinds = rng.sample(MATH_KINDS, request.num_questions)
    low, high = _bounds(rng, kinds)
    headers = [MATH_HEADER.format(kind=kind) for kind in kinds]
    single = len(kinds) == 1
    front = headers[0] + "\n\n" if single else ""
    tokens = [count_tokens(f", {number}") for number in range(MATH_MOST + 1)]
    # The answers are not known yet, so in training each answer gets the room of the longest.
    drafts = [
        Question(
            MATH_QUESTION if single else "\n\n" + header + MATH_QUESTION, MATH_PREFIX.format(kind=kind), (), f"{MATH_MOST}.5"
        )
        for kind, header in zip(kinds, headers, strict=True)
    ]

    def build(budget: int) -> str:
        numbers = draw_until_full(lambda: rng.randint(low, high), budget, tokens.__getitem__)
        if not numbers:
            raise TooShort(f"length {request.length} is too short: no number fits")
        return front + str(numbers)

    document = fit(request, drafts, MATH_TOKENS, count_tokens(front + "[]"), build)
    answers = [special_number(kind, json.loads(document.context.removeprefix(front))) for kind in kinds]
    questions = (
        dataclasses.replace(draft, answers=(answer,), target=answer) for draft, answer in zip(drafts, answers, strict=True)
    )
    return dataclasses.replace(document, questions=tuple(questions))
