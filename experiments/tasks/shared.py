"""Contexts for many questions, in the manner of SCBench (Li et al. 2024, arXiv:2412.10319).

SCBench's data is published, its generators are not. So the wording and the strings here are our own; the tasks and the
scorers are SCBench's. Its kv, vt and math_find are the other suites' tasks of these names with many questions.

* `prefix_suffix`: the string with a given beginning and end, among many strings with the same beginning or the same end.
* `many_shot`: a classification that is learned from hundreds of examples. SCBench takes its examples from BIG-Bench Hard.
  Here numbers fall into three classes by two hidden thresholds, so the right label follows from the text.
"""

from __future__ import annotations

import math
import string

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import draw_until_full, fit, mix
from experiments.tasks.words import distinct

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
    # The affixes belong to no split, because the middles of the strings do.
    affixes = (distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=AFFIX)), pool) for _ in range(2))
    prefixes, suffixes = affixes
    used: set[tuple[str, str]] = set()

    def draw() -> tuple[str, str, str]:
        while True:
            pair = rng.choice(prefixes), rng.choice(suffixes)
            if pair not in used:
                used.add(pair)
                return pair[0], words.letters(rng, rng.randint(*MIDDLE)), pair[1]

    asked = [draw() for _ in range(request.num_questions)]
    texts = ["".join(parts) for parts in asked]
    questions = [
        Question(STRING_QUESTION.format(prefix=prefix, suffix=suffix), STRING_PREFIX, (text,), f" {text}")
        for (prefix, _, suffix), text in zip(asked, texts, strict=True)
    ]

    def cost(line: str) -> int:
        return count_tokens("\n" + line)

    def build(budget: int) -> str:
        used.clear()
        used.update((prefix, suffix) for prefix, _, suffix in asked)
        others = draw_until_full(lambda: "".join(draw()), budget, cost)
        return STRING_CONTEXT.format(context="\n".join(mix(request, others, texts)))

    fixed = count_tokens(STRING_CONTEXT.format(context="")) + sum(map(cost, texts))
    return fit(request, questions, PREFIX_SUFFIX_TOKENS, fixed, build)


def many_shot(request: Request) -> Document:
    """Build a list of numbers labelled by two hidden thresholds, and ask for labels of other numbers."""
    rng, words, count_tokens = request.rng, request.words, request.count_tokens
    thresholds = [rng.randint(*span) for span in THRESHOLDS]

    def word() -> str:
        while not (noun := rng.choice(words.nouns)).isalpha():  # the scorer reads a single word
            pass
        return noun

    labels = distinct(word, len(thresholds) + 1)

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
    questions = [
        Question(SHOT_QUESTION.format(number=number), SHOT_PREFIX, (label(number),), " " + label(number)) for number in asked
    ]

    def shot(number: int) -> str:
        return SHOT.format(number=number, label=label(number))

    def cost(number: int) -> int:
        return count_tokens("\n\n" + shot(number))

    def build(budget: int) -> str:
        drawn = draw_until_full(lambda: rng.randint(*NUMBERS), budget, cost)
        shots = [*needed, *(number for number in drawn if number not in asked)]
        rng.shuffle(shots)
        return SHOT_CONTEXT.format(context="\n\n".join(map(shot, shots)))

    fixed = count_tokens(SHOT_CONTEXT.format(context="")) + sum(map(cost, needed))
    return fit(request, questions, MANY_SHOT_TOKENS, fixed, build)
