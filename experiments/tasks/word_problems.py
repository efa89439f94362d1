"""Arithmetic with a chain of thought: a sheet of word problems with drawn names and numbers, solved one after the other.

The templates are in the manner of GSM8K (Cobbe et al. 2021, arXiv:2110.14168). Each needs two or three operations on whole
numbers. A sheet holds as many problems as fill the length, so a model reasons over thousands of tokens, and goes back to the
sheet for each problem. The scorer reads the number of a problem and what stands behind ``Answer:``. How a model calculates is
free.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit_steps

SHEET = (
    "Below is a sheet of word problems. Solve them one after the other. For each problem write its number, then the "
    "calculation step by step, then its answer as a number.\n\n"
    "Example\nProblem 1: Ann has 12 pens. She buys 3 boxes of 5 pens, and gives 4 pens to Bob. How many pens does she have "
    "now?\nSolution:\nProblem 1: 3 * 5 = 15. 12 + 15 = 27. 27 - 4 = 23. Answer: 23\n\nNow the real sheet\n{problems}"
)
SINGLE_SHEET = (
    SHEET.partition("Problem 1: Ann")[0]
    + "Problem 1: Ann has 12 pens and gets 5 more from Bob. How many pens does Ann have now?\nSolution:\n"
    "Problem 1: 12 + 5 = 17. Answer: 17\n\nNow the real sheet\n{problems}"
)
SHEET_QUESTION = "\n\nSolve all {count} problems in this form, each in a line of its own."
SHEET_PREFIX = "Solution:\n"
_PEOPLE = ("Mia", "Tom", "Lena", "Omar", "Nina", "Paul", "Sara", "Ivan", "Rosa", "Hugo", "Dora", "Karl")
_THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "marbles", "tickets", "candles", "bottles")
_SLACK = 1.3  # tokens that may be generated / tokens of the shortest solution
_MOST_PROBLEMS = 512
_HEAD = re.compile(r"problem\s+(\d{1,6})\s*[:.)]", re.IGNORECASE)
_ANSWER = re.compile(r"answer\b[^\d\n]*?(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)

Drawn = tuple[str, Sequence[str], int]  # the problem, its calculation, its answer


def _bags(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    has, bags, each = rng.randint(11, 60), rng.randint(2, 9), rng.randint(3, 9)
    bought, gives = bags * each, rng.randint(2, 10)
    text = (
        f"{who} has {has} {what}. {who} buys {bags} boxes of {each} {what}, and gives {gives} {what} to {other}. "
        f"How many {what} does {who} have now?"
    )
    total = has + bought
    steps = (f"{bags} * {each} = {bought}", f"{has} + {bought} = {total}", f"{total} - {gives} = {total - gives}")
    return text, steps, total - gives


def _together(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    first, times = rng.randint(4, 30), rng.randint(2, 5)
    second = first * times
    text = f"{who} has {first} {what}. {other} has {times} times as many. How many {what} do they have together?"
    return text, (f"{first} * {times} = {second}", f"{first} + {second} = {first + second}"), first + second


def _shared(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    people, each, lost = rng.randint(2, 9), rng.randint(3, 12), rng.randint(2, 20)
    left = people * each
    text = (
        f"{who} had {left + lost} {what} and lost {lost} of them. {who} shares the rest equally among {people} friends. "
        f"How many {what} does each friend get?"
    )
    return text, (f"{left + lost} - {lost} = {left}", f"{left} / {people} = {each}"), each


def _change(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    count, price, note = rng.randint(2, 9), rng.randint(2, 9), rng.choice((100, 200))
    cost = count * price
    text = f"{who} buys {count} {what} for {price} dollars each, and pays with {note} dollars. How many dollars come back?"
    return text, (f"{count} * {price} = {cost}", f"{note} - {cost} = {note - cost}"), note - cost


def _weeks(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    a_day, days, spent = rng.randint(3, 12), rng.randint(3, 9), rng.randint(2, 8)
    total = a_day * days
    text = f"{who} finds {a_day} {what} each day for {days} days, and then loses {spent} of them. How many {what} are left?"
    return text, (f"{a_day} * {days} = {total}", f"{total} - {spent} = {total - spent}"), total - spent


def _more(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    first, more, fewer = rng.randint(20, 90), rng.randint(3, 19), rng.randint(3, 19)
    second = first + more
    text = (
        f"{who} has {first} {what}. {other} has {more} more than {who}. Their teacher has {fewer} fewer than {other}. "
        f"How many {what} does the teacher have?"
    )
    return text, (f"{first} + {more} = {second}", f"{second} - {fewer} = {second - fewer}"), second - fewer


def _sum(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    has, more = rng.randint(11, 60), rng.randint(2, 30)
    text = f"{who} has {has} {what} and gets {more} more from {other}. How many {what} does {who} have now?"
    return text, (f"{has} + {more} = {has + more}",), has + more


def _rest(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    has, gives = rng.randint(31, 90), rng.randint(2, 30)
    text = f"{who} has {has} {what} and gives {gives} of them to {other}. How many {what} does {who} have now?"
    return text, (f"{has} - {gives} = {has - gives}",), has - gives


def _boxes(rng: random.Random, who: str, other: str, what: str) -> Drawn:
    boxes, each = rng.randint(2, 9), rng.randint(3, 9)
    text = f"{who} has {boxes} boxes. Each holds {each} {what}. How many {what} does {who} have?"
    return text, (f"{boxes} * {each} = {boxes * each}",), boxes * each


_SINGLE: tuple[Callable[[random.Random, str, str, str], Drawn], ...] = (_sum, _rest, _boxes)
_TEMPLATES: tuple[Callable[[random.Random, str, str, str], Drawn], ...] = (
    _bags, _together, _shared, _change, _weeks, _more,
)  # fmt: skip


def answers_of(text: str) -> dict[int, str]:
    """Find the number behind ``Answer:`` of each problem in an answer; the first solution of a problem counts."""
    heads = list(_HEAD.finditer(text))
    ends = [*(head.start() for head in heads), len(text)][1:]
    numbers_of: dict[int, str] = {}
    for head, end in zip(heads, ends, strict=True):
        numbers = _ANSWER.findall(text[head.end() : end])
        if numbers:
            numbers_of.setdefault(int(head.group(1)), numbers[-1].replace(",", ""))
    return numbers_of


def right_problems(prediction: str, answers: Sequence[str]) -> list[bool]:
    """Tell for each problem whether its answer is right."""
    numbers = answers_of(prediction)
    return [at in numbers and float(numbers[at]) == float(answer) for at, answer in enumerate(answers, 1)]


def score_answered(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the problems that have an answer, right or wrong."""
    return len(answers_of(prediction).keys() & set(range(1, len(answers) + 1))) / len(answers)


def word_problems(request: Request, single: bool = False) -> Document:
    """Draw a sheet of word problems.

    Args:
        single: whether each problem needs one operation alone.
    """
    seed = request.rng.getrandbits(64)
    templates, sheet = (_SINGLE, SINGLE_SHEET) if single else (_TEMPLATES, SHEET)

    def build(count: int) -> Document:
        rng = random.Random(seed)
        problems, lines, answers = [], [], []
        for number in range(1, count + 1):
            who, other = rng.sample(_PEOPLE, 2)
            text, steps, answer = rng.choice(templates)(rng, who, other, rng.choice(_THINGS))
            problems.append(f"Problem {number}: {text}")
            lines.append(f"Problem {number}: {'. '.join(steps)}. Answer: {answer}")
            answers.append(str(answer))
        target = "\n".join(lines)
        asked = Question(SHEET_QUESTION.format(count=count), SHEET_PREFIX, tuple(answers), target)
        most = int(_SLACK * request.count_tokens(target)) + 64
        return Document(request.task, sheet.format(problems="\n".join(problems)), (asked,), most)

    return fit_steps(request, build, max(min(request.length // 50, _MOST_PROBLEMS), 1))
