"""Tasks of hidden numbers, of lists and of records: InfiniteBench's, SCBench's, and an answer as long as a list.

* InfiniteBench (Zhang et al. 2024, arXiv:2402.13718): `hidden_number` (passkey, number_string), `kv_retrieval`, `math_find`.
  A single question of math_find is asked in the suite's form, which names the wanted number before the list and after it.
  Several questions share the list, and each has its own header after the list, like SCBench's later turns. No
  number is held out of training, because those below 100 are too few.
* In the manner of SCBench (Li et al. 2024, arXiv:2412.10319), whose generators are not published: `prefix_suffix`, the
  string with a given beginning and end, among many strings with the same beginning or the same end; `many_shot`, a
  classification that is learned from hundreds of examples. SCBench takes its examples from BIG-Bench Hard. Here numbers fall
  into three classes by two hidden thresholds, so the right label follows from the text.
* `listing`: the values of all records of a text, in their order. No suite has this task. Most long-context tasks end after a
  few decode steps, which says little about a method that selects anew at every step. Here the answer fills a share of the
  length, so it takes thousands of steps, and the record that the next token depends on moves through the text.
"""

import dataclasses
import json
import math
import random
import statistics
import string

from experiments.tasks.base import Document, Question, Request, TooShort
from experiments.tasks.fitting import draw_until_full, fit, fit_among, insert
from experiments.tasks.words import distinct

MATH_MOST = 99  # numbers are 0 to 99
MATH_SHARE = 0.2  # the part of the range in which the largest and the smallest number fall
MATH_KINDS = (
    *("largest number", "second largest number", "third largest number"),
    *("smallest number", "second smallest number", "third smallest number", "median number"),
)
_RANKS = {"third": 3, "second": 2}
AFFIX = 4  # letters of a prefix or suffix
MIDDLE = (6, 12)  # letters between prefix and suffix, at least and at most
NUMBERS = (10_000, 99_999)
THRESHOLDS = ((30_000, 45_000), (65_000, 80_000))  # ranges of the two thresholds
NEAR = 100  # on either side of an asked number there is an example of its class within this distance
LISTING_SHARE = 0.25  # tokens of the answers to all questions about a context / tokens of the length
LISTING_SLACK = 0.125  # extra tokens that may be generated, for numbers or other separators / tokens of the answer


def hidden_number(request: Request) -> Document:
    """Hide five digits (passkey), or ten digits of which some are doubled, with a single question."""
    words, haystack, prompt = request.words, request.haystack, request.prompt
    value = words.digit_string(request.rng, 5) if request.task == "passkey" else words.repeated_digit_string(request.rng)
    return fit_among(
        request,
        [Question(prompt.question, prompt.prefix, (value,), f" {value}.")],
        [prompt.forms["needle"].format(key=value)],
        lambda budget: haystack.span(request.rng, budget),
        lambda text: request.count_tokens("\n" + text),
        haystack.separator.join,
    )


def kv_retrieval(request: Request) -> Document:
    """Build a JSON object of uuid pairs, which is its own haystack; each question asks for a key's value."""
    rng, words, prompt = request.rng, request.words, request.prompt
    values = {key: words.uuid(rng) for key in words.distinct("uuids", request.num_questions, rng)}

    def cost(pair: str) -> int:
        return request.count_tokens(pair + ", ")

    return fit_among(
        request,
        [Question(prompt.question.format(key=key), prompt.prefix, (value,), value) for key, value in values.items()],
        [f'"{key}": "{value}"' for key, value in values.items()],
        lambda budget: draw_until_full(lambda: f'"{words.uuid(rng)}": "{words.uuid(rng)}"', budget, cost),
        cost,
        lambda pairs: "{" + ", ".join(pairs) + "}",
    )


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
    rng, count_tokens, prompt = request.rng, request.count_tokens, request.prompt
    kinds = rng.sample(MATH_KINDS, request.num_questions)
    low, high = _bounds(rng, kinds)
    single = len(kinds) == 1
    front = prompt.context.format(kind=kinds[0]) if single else ""
    tokens = [count_tokens(f", {number}") for number in range(MATH_MOST + 1)]
    drafts = [
        Question(
            prompt.question if single else "\n\n" + prompt.context.format(kind=kind).rstrip() + prompt.question,
            prompt.prefix.format(kind=kind),
            (),
            "",
        )
        for kind in kinds
    ]

    def build(budget: int) -> str:
        numbers = draw_until_full(lambda: rng.randint(low, high), budget, tokens.__getitem__)
        if not numbers:
            raise TooShort(f"length {request.length} is too short: no number fits")
        return front + str(numbers)

    document = fit(request, drafts, count_tokens(front + "[]"), build)
    answers = [special_number(kind, json.loads(document.context.removeprefix(front))) for kind in kinds]
    pairs = zip(drafts, answers, strict=True)
    questions = tuple(dataclasses.replace(draft, answers=(answer,), target=answer) for draft, answer in pairs)
    return dataclasses.replace(document, questions=questions)


def prefix_suffix(request: Request) -> Document:
    """Build a list of strings; each prefix and each suffix occurs many times, but each pair of both only once."""
    rng, words, prompt = request.rng, request.words, request.prompt
    # A line is more than 4 tokens, so there are more pairs than lines.
    pool = math.isqrt(request.length // 4) + 2 + request.num_questions
    # The affixes may be of the training, because the middles of the strings are held out.
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
        Question(prompt.question.format(prefix=prefix, suffix=suffix), prompt.prefix, (text,), f" {text}")
        for (prefix, _, suffix), text in zip(asked, texts, strict=True)
    ]

    def cost(line: str) -> int:
        return request.count_tokens("\n" + line)

    def others(budget: int) -> list[str]:
        used.clear()
        used.update((prefix, suffix) for prefix, _, suffix in asked)
        return draw_until_full(lambda: "".join(draw()), budget, cost)

    return fit_among(request, questions, texts, others, cost, "\n".join)


def many_shot(request: Request) -> Document:
    """Build a list of numbers labelled by two hidden thresholds, and ask for labels of other numbers."""
    rng, words, count_tokens, prompt = request.rng, request.words, request.count_tokens, request.prompt
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
        Question(prompt.question.format(number=number), prompt.prefix, (label(number),), " " + label(number))
        for number in asked
    ]

    def shot(number: int) -> str:
        return prompt.forms["shot"].format(number=number, label=label(number))

    def cost(number: int) -> int:
        return count_tokens("\n\n" + shot(number))

    def build(budget: int) -> str:
        drawn = draw_until_full(lambda: rng.randint(*NUMBERS), budget, cost)
        shots = [*needed, *(number for number in drawn if number not in asked)]
        rng.shuffle(shots)
        return prompt.context.format(context="\n\n".join(map(shot, shots)))

    return fit(request, questions, count_tokens(prompt.context.format(context="")) + sum(map(cost, needed)), build)


def listing(request: Request) -> Document:
    """Hide records in prose, as many as fill the wanted share with answers; each question has records of its own name."""
    rng, words, haystack, count_tokens = request.rng, request.words, request.haystack, request.count_tokens
    prompt = request.prompt
    owners = distinct(lambda: rng.choice(words.nouns), request.num_questions)
    asked = [(prompt.question.format(name=name), prompt.prefix.format(name=name)) for name in owners]
    header = count_tokens(prompt.context.format(context=""))
    fixed = header + sum(count_tokens("".join(texts)) for texts in asked)

    def answer_tokens(tokens: int) -> int:
        return tokens + int(LISTING_SLACK * tokens) + 1  # end of sequence

    limit = min(int(LISTING_SHARE * request.length), prompt.tokens)
    records: list[tuple[str, str, str]] = []  # owner, value and text, in the order of the text
    seen: set[str] = set()
    needle_tokens = value_tokens = 0
    while True:
        owner = owners[len(records) % len(owners)]
        key, value = words.word(rng), words.uuid(rng)
        if key in seen or value in seen:
            continue
        text = prompt.forms["needle"].format(name=owner, key=key, value=value)
        needle_tokens += count_tokens(haystack.separator + text)
        value_tokens += count_tokens(f" {value},")
        room = answer_tokens(value_tokens)
        if room > limit or fixed + needle_tokens + room > request.length:
            break
        seen |= {key, value}
        records.append((owner, value, text))
    if len(records) < len(owners):
        raise TooShort(
            f"length {request.length} is too short: {len(records)} records fit, {len(owners)} questions need one each"
        )
    records = rng.sample(records, len(records))
    needles = [text for _, _, text in records]
    questions = []
    for owner, (question, prefix) in zip(owners, asked, strict=True):
        answers = tuple(value for name, value, _ in records if name == owner)
        questions.append(Question(question, prefix, answers, " " + ", ".join(answers) + "."))
    new_tokens = max(answer_tokens(count_tokens(question.target)) for question in questions)

    def build(budget: int) -> str:
        sentences = haystack.span(rng, budget)
        positions = sorted(rng.randrange(len(sentences) + 1) for _ in needles)
        return prompt.context.format(context=haystack.separator.join(insert(sentences, needles, positions)))

    return fit(
        request, questions, header + sum(count_tokens(haystack.separator + text) for text in needles), build, new_tokens
    )
