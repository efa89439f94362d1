"""Arithmetic with a chain of thought: a sheet of word problems with drawn names and numbers, solved one after the other.

The templates are in the manner of GSM8K (Cobbe et al. 2021, arXiv:2110.14168); tasks.toml has them. Each needs one to three
operations on whole numbers. A sheet holds as many problems as fill the length, so a model reasons over thousands of tokens,
and goes back to the sheet for each problem. The scorer reads the number of a problem and what stands behind ``Answer:``. How
a model calculates is free.
"""

import operator
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit_steps

_PEOPLE = ("Mia", "Tom", "Lena", "Omar", "Nina", "Paul", "Sara", "Ivan", "Rosa", "Hugo", "Dora", "Karl")
_THINGS = ("apples", "books", "coins", "stamps", "shells", "cards", "marbles", "tickets", "candles", "bottles")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}
_SLACK = 1.3  # tokens that may be generated / tokens of the shortest solution
_MOST_PROBLEMS = 512
_HEAD = re.compile(r"problem\s+(\d{1,6})\s*[:.)]", re.IGNORECASE)
_ANSWER = re.compile(r"answer\b[^\d\n]*?(-?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE)


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


def score_problems(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the problems whose answer is right."""
    numbers = answers_of(prediction)
    return sum(at in numbers and float(numbers[at]) == float(answer) for at, answer in enumerate(answers, 1)) / len(answers)


def score_answered(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the problems that have an answer, right or wrong."""
    return len(answers_of(prediction).keys() & set(range(1, len(answers) + 1))) / len(answers)


def _problem(rng: random.Random, templates: Sequence[Mapping[str, Any]]) -> tuple[str, str, str]:
    """Draw a problem; returns its text, its calculation and its answer.

    A template has a text, the range of each number that is drawn, and the steps of its calculation, ``RESULT = ONE * OTHER``.
    The steps ``given`` come first and are not shown: numbers that the text needs.
    """
    who, other = rng.sample(_PEOPLE, 2)
    template, what = rng.choice(templates), rng.choice(_THINGS)
    numbers = {name: rng.randint(low, high) for name, (low, high) in template["draws"].items()}
    calculation = []
    for step in (*template.get("given", ()), *template["steps"]):
        result, _, one, sign, two = step.split()
        left, right = (int(name) if name.isdigit() else numbers[name] for name in (one, two))
        numbers[result] = _OPERATIONS[sign](left, right)
        calculation.append(f"{left} {sign} {right} = {numbers[result]}")
    text = template["text"].format(who=who, other=other, what=what, **numbers)
    return text, ". ".join(calculation[-len(template["steps"]) :]), str(numbers[result])


def word_problems(request: Request, templates: Sequence[Mapping[str, Any]]) -> Document:
    """Draw a sheet of word problems, each of one of the templates."""
    seed, prompt = request.rng.getrandbits(64), request.prompt

    def build(count: int) -> Document:
        rng = random.Random(seed)
        texts, steps, answers = zip(*(_problem(rng, templates) for _ in range(count)), strict=True)
        lines = (
            f"Problem {at}: {line}. Answer: {answer}" for at, (line, answer) in enumerate(zip(steps, answers, strict=True), 1)
        )
        target = "\n".join(lines)
        problems = "\n".join(f"Problem {at}: {text}" for at, text in enumerate(texts, 1))
        question = Question(prompt.question.format(count=count), prompt.prefix, answers, target)
        most = int(_SLACK * request.count_tokens(target)) + 64
        return Document(request.task, prompt.context.format(problems=problems), (question,), most)

    return fit_steps(request, build, max(min(request.length // 50, _MOST_PROBLEMS), 1))
