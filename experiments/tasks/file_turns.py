"""Several turns over one long file: later questions refer to earlier ones, so a conversation's cache must hold both.

SCBench (Li et al. 2024, arXiv:2412.10319) asks about a context again and again; its questions stand alone. Here a question
may say "the same section", or name an earlier question by its number. So the questions behind the first are asked in turns
alone (`--question turns`).

The file is in the form of an INI file: sections with the same keys and drawn values.
"""

from __future__ import annotations

import random

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit

TURN_TOKENS = 24
CONTEXT = (
    "Below is the file machines.ini. Read it carefully. I will ask several questions about it, one after the other.\n\n"
    "{context}"
)
ASKED = "\n\nQuestion {number}: {question} Answer with the value alone."
NEW = "In the section [{section}], what is the value of {key}?"
SAME = "In the same section, what is the value of {key}?"
BACK = "Go back to the section of question {number}: what is its value of {key}?"
PREFIX = "\nThe value of {key} is"
KEYS = ("owner", "port", "room", "disk", "region", "backup")
_NUMBERS = ("port", "disk")  # keys whose values are numbers


def file_turns(request: Request) -> Document:
    """Draw a file of sections, and questions that refer to each other.

    Question 1 names a section. Later ones name another section, ask about the section before, or about the section of an
    earlier question, which is drawn. No key of a section is asked for twice.

    Raises:
        ValueError: the length is too short.
    """
    rng, words, count_tokens = request.rng, request.words, request.count_tokens
    nouns = [noun for noun in words.nouns if noun.isalpha()]
    # A line is more than 4 tokens, so there are more names than sections.
    names = words.distinct("words", request.length // (4 * len(KEYS)) + request.num_questions + 1, rng)

    def section(name: str) -> dict[str, str]:
        return {
            "name": name,
            **{key: words.number(rng, 4) if key in _NUMBERS else rng.choice(nouns) for key in KEYS},
        }

    asked: dict[str, dict[str, str]] = {}  # the sections that are asked about
    left: dict[str, list[str]] = {}  # keys of each section that were not asked for
    turns: list[str] = []  # the section of each question
    questions = []
    for number in range(1, request.num_questions + 1):
        earlier = [at for at, name in enumerate(turns[:-1], 1) if left[name] and name != turns[-1]]
        form = rng.choice([NEW, *([SAME] if turns and left[turns[-1]] else []), *([BACK, BACK] if earlier else [])])
        back = rng.choice(earlier) if form == BACK else 0
        name = names[len(asked)] if form == NEW else turns[back - 1]  # 0 - 1: the section before
        if name not in asked:
            asked[name], left[name] = section(name), rng.sample(KEYS, len(KEYS))
        key = left[name].pop()
        told = ASKED.format(number=number, question=form.format(section=name, key=key, number=back))
        turns.append(name)
        questions.append(Question(told, PREFIX.format(key=key), (asked[name][key],), f" {asked[name][key]}"))
    room = request.answer_room(questions, TURN_TOKENS)
    texts = [_text(values) for values in asked.values()]
    fixed = count_tokens(CONTEXT.format(context="")) + room + request.question_tokens(questions)
    fixed += sum(count_tokens("\n\n" + text) for text in texts)

    def build(budget: int) -> Document:
        pool = iter(names[len(asked) :])
        others: list[str] = []
        while budget > 0:
            text = _text(section(next(pool)))
            budget -= count_tokens("\n\n" + text)
            if budget >= 0:
                others.append(text)
        return Document("file_turns", CONTEXT.format(context="\n\n".join(_mixed(rng, others, texts))), made, TURN_TOKENS)

    made = tuple(questions)
    return fit(request, build, fixed, room)


def _text(values: dict[str, str]) -> str:
    return "\n".join([f"[{values['name']}]", *(f"{key} = {values[key]}" for key in KEYS)])


def _mixed(rng: random.Random, others: list[str], texts: list[str]) -> list[str]:
    """Insert each text at a random place among the other texts."""
    merged = list(others)
    for text in texts:
        merged.insert(rng.randrange(len(merged) + 1), text)
    return merged
