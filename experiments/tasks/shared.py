"""Contexts for many questions, in the manner of SCBench (Li et al. 2024, arXiv:2412.10319).

SCBench's data is published, its generators are not. So the wording and the strings here are our own; the tasks and the
scorers are SCBench's. Its kv, vt and math_find are the other suites' tasks of these names with many questions.

* `prefix_suffix`: the string with a given beginning and end, among many strings with the same beginning or the same end.
* `many_shot`: a classification that is learned from hundreds of examples. SCBench takes its examples from BIG-Bench Hard.
  Here numbers fall into three classes by two hidden thresholds, so the right label follows from the text.
"""

from __future__ import annotations

import math
import random

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit

PREFIX_SUFFIX_TOKENS = 40
AFFIX = 4  # letters of a prefix or suffix
MIDDLE = (6, 12)  # letters between prefix and suffix, at least and at most
STRING_CONTEXT = (
    "Below is a list of strings, one in each line. Memorize all of them. "
    "I will give you the prefix and the suffix of one of them and ask for the whole string.\n\n{context}"
)
STRING_QUESTION = '\n\nWhich string of the list has the prefix "{prefix}" and the suffix "{suffix}"?'
STRING_PREFIX = "\nThe string is:"

MANY_SHOT_TOKENS = 10
NUMBERS = (10_000, 99_999)
THRESHOLDS = ((30_000, 45_000), (65_000, 80_000))  # ranges of the two thresholds
NEAR = 100  # on either side of an asked number there is an example of its class within this distance
SHOT_CONTEXT = (
    "Every number below has a label. The labels follow a hidden rule. Learn the rule from the examples. "
    "I will ask for the label of another number.\n\n{context}"
)
SHOT = "Number: {number}\nLabel: {label}"
SHOT_QUESTION = "\n\nNumber: {number}"
SHOT_PREFIX = "\nLabel:"


def prefix_suffix(request: Request) -> Document:
    """Build a list of strings; each prefix and each suffix occurs many times, but each pair of both only once."""
    rng, words, count_tokens = request.rng, request.words, request.count_tokens
    # A line is more than 4 tokens, so there are more pairs than lines.
    pool = math.isqrt(request.length // 4) + 2 + request.num_questions
    prefixes, suffixes = (_distinct_letters(rng, pool) for _ in range(2))
    used: set[tuple[str, str]] = set()

    def string() -> tuple[str, str, str]:
        while True:
            pair = rng.choice(prefixes), rng.choice(suffixes)
            if pair not in used:
                used.add(pair)
                return pair[0], words.letters(rng, rng.randint(*MIDDLE)), pair[1]

    asked = [string() for _ in range(request.num_questions)]
    questions = tuple(
        Question(
            STRING_QUESTION.format(prefix=parts[0], suffix=parts[2]),
            STRING_PREFIX,
            ("".join(parts),),
            " " + "".join(parts),
        )
        for parts in asked
    )
    room = request.answer_room(questions, PREFIX_SUFFIX_TOKENS)
    fixed = count_tokens(STRING_CONTEXT.format(context="")) + room + request.question_tokens(questions)
    fixed += sum(count_tokens("\n" + "".join(parts)) for parts in asked)

    def build(budget: int) -> Document:
        used.clear()
        used.update((parts[0], parts[2]) for parts in asked)
        lines: list[str] = []
        while budget > 0:
            text = "".join(string())
            budget -= count_tokens("\n" + text)
            if budget >= 0:
                lines.append(text)
        others = len(lines)
        for index, parts in enumerate(asked):
            chosen = request.depth is not None and index == 0
            position = round(request.depth * others) if chosen else rng.randrange(len(lines) + 1)
            lines.insert(position, "".join(parts))
        return Document(
            "prefix_suffix", STRING_CONTEXT.format(context="\n".join(lines)), questions, PREFIX_SUFFIX_TOKENS
        )

    return fit(request, build, fixed, room)


def _distinct_letters(rng: random.Random, count: int) -> list[str]:
    """Draw different prefixes or suffixes; they belong to no split, because the middles of the strings do."""
    drawn: dict[str, None] = {}
    while len(drawn) < count:
        drawn["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=AFFIX))] = None
    return list(drawn)


def many_shot(request: Request) -> Document:
    """Build a list of numbers labelled by two hidden thresholds, and ask for labels of other numbers."""
    rng, words, count_tokens = request.rng, request.words, request.count_tokens
    thresholds = [rng.randint(*span) for span in THRESHOLDS]
    names: dict[str, None] = {}
    while len(names) < len(thresholds) + 1:
        noun = rng.choice(words.nouns)
        if noun.isalpha():  # the scorer reads a single word
            names[noun] = None
    labels = list(names)

    def label(number: int) -> str:
        return labels[sum(number > threshold for threshold in thresholds)]

    asked: dict[int, None] = {}
    needed: list[int] = []
    while len(asked) < request.num_questions:
        number = int(words.number(rng, len(str(NUMBERS[0]))))
        near = [max(NUMBERS[0], number - rng.randint(1, NEAR)), min(NUMBERS[1], number + rng.randint(1, NEAR))]
        if number in asked or number in near or any(label(other) != label(number) for other in near):
            continue
        asked[number] = None
        needed += near
    needed = [number for number in dict.fromkeys(needed) if number not in asked]
    questions = tuple(
        Question(SHOT_QUESTION.format(number=number), SHOT_PREFIX, (label(number),), " " + label(number))
        for number in asked
    )

    def shot(number: int) -> str:
        return SHOT.format(number=number, label=label(number))

    room = request.answer_room(questions, MANY_SHOT_TOKENS)
    fixed = count_tokens(SHOT_CONTEXT.format(context="")) + room + request.question_tokens(questions)
    fixed += sum(count_tokens("\n\n" + shot(number)) for number in needed)

    def build(budget: int) -> Document:
        shots = list(needed)
        while budget > 0:
            number = rng.randint(*NUMBERS)
            budget -= count_tokens("\n\n" + shot(number))
            if budget >= 0 and number not in asked:
                shots.append(number)
        rng.shuffle(shots)
        context = SHOT_CONTEXT.format(context="\n\n".join(shot(number) for number in shots))
        return Document("many_shot", context, questions, MANY_SHOT_TOKENS)

    return fit(request, build, fixed, room)
