"""RULER's generated tasks (Hsieh et al. 2024, arXiv:2404.06654): needles, variable tracking, common and frequent words.

Prompts are the suite's own, including its global "are" -> "is" rewriting for single answers; so are repetitions and the
one-shot example of cwe. Departures: cwe draws only from the wonderwords lists, without the few entries of several words.
Beyond about 128K tokens, where these lists are too short, the suite takes a larger list. cwe takes words of
the training, too: a tenth of them would last for about 13K tokens only. Every document has a word order of its own,
where the suite shuffles all documents alike.
"""

import dataclasses
import itertools
import math
import random

from experiments.tasks.base import Document, Prompt, Question, Request, TooShort
from experiments.tasks.fitting import draw_until_full, fit, insert
from experiments.tasks.haystack import NOISE
from experiments.tasks.words import Words, distinct, every_word

VT_HOPS = 4
ONE_SHOT_FROM = 1024  # tokens; longer documents of vt and cwe begin with a solved example
CWE_COMMON = 10  # common words
CWE_SHORT = 4096  # tokens; shorter documents have the second of each pair below
CWE_REPEATS = ((30, 3), (6, 1))  # repetitions of common and of other words
CWE_EXAMPLE = ((40, 10, 3), (20, 3, 1))  # words and repetitions of the one-shot example
FWE_LETTERS = 6
FWE_DOTS = "..."  # stands for the most frequent word
FWE_ALPHA = 2  # exponent of the Zeta law
_ZETA = math.pi**2 / 6  # zeta(2)
FWE_VOCABULARY = 50  # tokens of the length for each coded word


def singular_form(template: str) -> str:
    """Rewrite a template for a single answer as RULER does, which replaces every "are", even within words."""
    return template.replace("Some", "A").replace("are all", "is").replace("are", "is")


def _singular(prompt: Prompt) -> Prompt:
    texts = {name: singular_form(vars(prompt)[name]) for name in ("context", "question", "prefix")}
    return dataclasses.replace(prompt, **texts)


def join_answers(values: list[str] | tuple[str, ...]) -> str:
    """Join queries as the suite does: `a`, `a, and b`, `a, b, and c`."""
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + ", and " + values[-1]


def _positions(rng: random.Random, count: int, size: int) -> list[int]:
    """Draw where to insert `count` needles among `size` sentences: at the suite's 40 depths, or anywhere if 40 is too few."""
    if count <= 40:
        return [size * step // 39 for step in rng.sample(range(40), count)]
    return [rng.randrange(size + 1) for _ in range(count)]


def niah(
    request: Request,
    keys: str = "words",
    values: str = "numbers",
    num_keys: int = 1,
    num_values: int = 1,
    num_queries: int = 1,
    among_needles: bool = False,
) -> Document:
    """Build a needle document.

    Args:
        request: what to make.
        keys: kind of key, "words" or "uuids".
        values: kind of value, "numbers" or "uuids".
        num_keys: number of keys in the text (a haystack of needles has as many as fit).
        num_values: number of values of each queried key.
        num_queries: number of keys that a question asks for.
        among_needles: whether the haystack consists of needles, too.
    """
    rng, words, haystack, count_tokens = request.rng, request.words, request.haystack, request.count_tokens
    prompt, kind, needle = request.prompt, values, request.prompt.forms["needle"]
    if num_values * num_queries == 1:
        prompt, kind = _singular(prompt), values[:-1]
    asked = request.num_questions * num_queries
    drawn_keys = words.distinct(keys, max(num_keys, asked, 2 if among_needles else 1), rng)
    values_of = {key: words.distinct(values, num_values, rng) for key in drawn_keys}
    needles = [(k, needle.format(kind=values, key=k, value=v)) for k in drawn_keys for v in values_of[k]]
    rng.shuffle(needles)
    separator = "\n" if among_needles else haystack.separator

    def questions() -> list[Question]:
        groups = [drawn_keys[start : start + num_queries] for start in range(0, asked, num_queries)]
        answers = [tuple(value for key in group for value in values_of[key]) for group in groups]
        return [
            Question(
                prompt.question.format(kind=kind, query=join_answers(group)),
                prompt.prefix.format(kind=kind, query=join_answers(group)),
                mine,
                " " + join_answers(mine) + ".",
            )
            for group, mine in zip(groups, answers, strict=True)
        ]

    def cost(text: str) -> int:
        return count_tokens(separator + text)

    def distractor() -> tuple[str, str]:
        key, value = words.distinct(keys, 1, rng)[0], words.distinct(values, 1, rng)[0]
        return key, needle.format(kind=values, key=key, value=value)

    def build(budget: int) -> str:
        if among_needles:
            drawn = draw_until_full(distractor, budget, lambda one: cost(one[1]))
            filler = [text for key, text in drawn if key not in values_of]
        else:
            filler = haystack.span(rng, budget)
        positions = _positions(rng, len(needles), len(filler))
        if request.depth is not None:
            first = next(i for i, (key, _) in enumerate(needles) if key == drawn_keys[0])
            positions[first] = round(request.depth * len(filler))
        body = separator.join(insert(filler, [text for _, text in needles], positions))
        return prompt.context.format(kind=kind, context=body)

    fixed = count_tokens(prompt.context.format(kind=kind, context="")) + sum(cost(text) for _, text in needles)
    document = fit(request, questions(), fixed, build)
    for mine in values_of.values():  # the answers come in the order of the text
        mine.sort(key=lambda value: document.context.index(f" is: {value}."))
    return dataclasses.replace(document, questions=tuple(questions()))


def _chain(rng: random.Random, words: Words, value: str, letters: int) -> tuple[list[str], list[str]]:
    names = distinct(lambda: words.variable(rng, letters), VT_HOPS + 1)
    statements = [f"VAR {names[0]} = {value}"]
    statements += [f"VAR {new} = VAR {old} " for old, new in itertools.pairwise(names)]
    return names, statements


def _interleave(rng: random.Random, sentences: list[str], chain: list[str]) -> list[str]:
    """Insert a chain's statements, in order, at random positions."""
    positions = sorted(rng.sample(range(len(sentences) + 1), min(len(chain), len(sentences) + 1)))
    positions += [len(sentences)] * (len(chain) - len(positions))
    return insert(sentences, chain, positions)


def variable_tracking(request: Request) -> Document:
    """Build a variable-tracking document with a chain for each question.

    The task takes no depth, because a chain is spread over the whole text.
    """
    rng, words, haystack, count_tokens = request.rng, request.words, request.haystack, request.count_tokens
    prompt = request.prompt
    numbers = distinct(lambda: words.number(rng, 5), request.num_questions)
    chains = [_chain(rng, words, value, letters=5) for value in numbers]

    def asked(value: str, names: list[str]) -> tuple[str, str]:
        return prompt.question.format(query=value), prompt.prefix.format(query=value, count=len(names))

    questions = [
        Question(*asked(value, names), tuple(names), " ".join(names))
        for value, (names, _) in zip(numbers, chains, strict=True)
    ]
    head = ""
    if request.length >= ONE_SHOT_FROM:
        value = words.number(rng, 5)
        names, statements = _chain(rng, words, value, letters=3)
        body = "\n".join(_interleave(rng, [NOISE] * 5, statements)).replace(". \n", ".\n")
        head = prompt.context.format(context=body) + "".join(asked(value, names)) + " ".join(names) + "\n\n"

    def build(budget: int) -> str:
        sentences = haystack.span(rng, budget)
        for _, statements in chains:
            sentences = _interleave(rng, sentences, statements)
        return head + prompt.context.format(context=haystack.separator.join(sentences).replace(". \n", ".\n"))

    fixed = count_tokens(head + prompt.context.format(context=""))
    fixed += sum(count_tokens("\n" + text) for _, statements in chains for text in statements)
    return fit(request, questions, fixed, build)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _word_list(rng: random.Random, common: list[str], others: list[str], often: int, seldom: int) -> str:
    """Shuffle the words and format them as the numbered list."""
    entries = common * often + others * seldom
    rng.shuffle(entries)
    return _numbered(entries)


def common_words(request: Request) -> Document:
    """Build a cwe document with a single question."""
    rng, count_tokens, prompt = request.rng, request.count_tokens, request.prompt
    short = request.length < CWE_SHORT
    often, seldom = CWE_REPEATS[short]
    known = every_word()
    head = ""
    if request.length >= ONE_SHOT_FROM:
        size, *repeats = CWE_EXAMPLE[short]
        drawn = rng.sample(known, size)
        body = _word_list(rng, drawn[:CWE_COMMON], drawn[CWE_COMMON:], *repeats)
        head = prompt.context.format(context=body) + prompt.question + prompt.prefix
        head += " " + _numbered(drawn[:CWE_COMMON]) + "\n"
    order = rng.sample(known, len(known))
    common, others = order[:CWE_COMMON], order[CWE_COMMON:]
    question = Question(prompt.question, prompt.prefix, tuple(common), " " + _numbered(common))
    # Numbers with the same number of digits are counted alike; `fit` counts the whole prompt once more.
    number_tokens = [count_tokens(f" {10**digits - 1}.") for digits in range(7)]

    def entry_tokens(word: str, before: int, times: int) -> int:
        """Count the tokens of `times` more entries of a word after `before` entries."""
        numbers = sum(number_tokens[len(str(before + entry))] for entry in range(1, times + 1))
        return times * count_tokens(" " + word) + numbers

    def build(budget: int) -> str:
        taken: list[str] = []
        for word in others:
            budget -= entry_tokens(word, often * CWE_COMMON + seldom * len(taken), seldom)
            if budget < 0:
                break
            taken.append(word)
        else:
            raise ValueError(f"length {request.length} is more than the {len(known)} words that cwe draws from can fill")
        return head + prompt.context.format(context=_word_list(rng, common, taken, often, seldom))

    fixed = count_tokens(head + prompt.context.format(context=""))
    fixed += sum(entry_tokens(word, often * index, often) for index, word in enumerate(common))
    return fit(request, [question], fixed, build)


def zeta_counts(total: int, size: int) -> list[int]:
    """Compute how often words of rank 1 to `size` occur in about `total` words: total / zeta(2) / rank^2, rounded down."""
    return [int(total / rank**FWE_ALPHA / _ZETA) for rank in range(1, size + 1)]


def frequent_words(request: Request) -> Document:
    """Build a fwe document of coded words under a Zeta law; its single question asks for ranks 2 to 4."""
    rng, words, count_tokens, prompt = request.rng, request.words, request.count_tokens, request.prompt
    count = max(5, (request.length - prompt.tokens) // FWE_VOCABULARY)
    vocabulary = [FWE_DOTS, *distinct(lambda: words.letters(rng, FWE_LETTERS), count)[1:]]
    tokens = [count_tokens(" " + word) for word in vocabulary]
    answers = tuple(vocabulary[1:4])
    question = Question(prompt.question, prompt.prefix, answers, " " + join_answers(answers) + ".")

    def size(total: int) -> int:
        return sum(count * cost for count, cost in zip(zeta_counts(total, len(vocabulary)), tokens, strict=True))

    def build(budget: int) -> str:
        low, high = 0, 2 * budget + 1  # words; the law rounds down, so the text has fewer than `total` words
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if size(middle) <= budget else (low, middle)
        counts = zeta_counts(low, len(vocabulary))
        if counts[3] == counts[4]:
            raise TooShort(f"length {request.length} is too short: the words of rank 4 and 5 both appear {counts[3]} times")
        body = list(itertools.chain(*([word] * count for word, count in zip(vocabulary, counts, strict=True))))
        rng.shuffle(body)
        return prompt.context.format(context=" ".join(body))

    return fit(request, [question], count_tokens(prompt.context.format(context="")), build)
