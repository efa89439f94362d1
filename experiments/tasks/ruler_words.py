"""RULER's aggregation tasks (Hsieh et al. 2024, arXiv:2404.06654): common words (cwe) and frequent coded words (fwe).

Repetitions, prompts and the one-shot example of cwe are the suite's. Departures: cwe draws only from the wonderwords lists,
without the few entries of several words. Beyond about 128K tokens, where these lists are too short, the suite takes a larger
list. cwe has no training split, because a tenth of the words, the evaluation split, would last for about 13K tokens only.
Every document has a word order of its own, where the suite shuffles all documents alike.
"""

from __future__ import annotations

import itertools
import math
import random

from experiments.tasks.base import Document, Question, Request, TooShort, join_answers
from experiments.tasks.fitting import fit
from experiments.tasks.ruler import ONE_SHOT_FROM
from experiments.tasks.words import distinct, every_word

CWE_TOKENS = 120
CWE_COMMON = 10  # common words
CWE_REPEATS = (30, 3)  # repetitions of common and of other words
CWE_SHORT_REPEATS = (6, 1)  # below `CWE_SHORT` tokens
CWE_SHORT = 4096
CWE_EXAMPLE = (40, 10, 3)  # words and repetitions of the one-shot example
CWE_SHORT_EXAMPLE = (20, 3, 1)
CWE_CONTEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}"
)
CWE_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
FWE_TOKENS = 50
FWE_LETTERS = 6
FWE_DOTS = "..."  # stands for the most frequent word
FWE_ALPHA = 2  # exponent of the Zeta law
_ZETA = math.pi**2 / 6  # zeta(2)
FWE_VOCABULARY = 50  # tokens of the length for each coded word
FWE_CONTEXT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}"
)
FWE_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


def _word_list(rng: random.Random, common: list[str], others: list[str], repeats: tuple[int, int]) -> str:
    """Shuffle the words and format them as the numbered list."""
    entries = common * repeats[0] + others * repeats[1]
    rng.shuffle(entries)
    return _numbered(entries)


def common_words(request: Request) -> Document:
    """Build a cwe document with a single question."""
    rng, count_tokens = request.rng, request.count_tokens
    short = request.length < CWE_SHORT
    repeats = CWE_SHORT_REPEATS if short else CWE_REPEATS
    known = every_word()
    head = ""
    if request.length >= ONE_SHOT_FROM:
        size, *example_repeats = CWE_SHORT_EXAMPLE if short else CWE_EXAMPLE
        drawn = rng.sample(known, size)
        example, rest = drawn[:CWE_COMMON], drawn[CWE_COMMON:]
        body = _word_list(rng, example, rest, (example_repeats[0], example_repeats[1]))
        head = CWE_CONTEXT.format(context=body) + CWE_QUESTION + CWE_PREFIX + " " + _numbered(example) + "\n"
    order = rng.sample(known, len(known))
    common, others = order[:CWE_COMMON], order[CWE_COMMON:]
    question = Question(CWE_QUESTION, CWE_PREFIX, tuple(common), " " + _numbered(common))
    # Numbers with the same number of digits are counted alike; `fit` counts the whole prompt once more.
    number_tokens = [count_tokens(f" {10**digits - 1}.") for digits in range(7)]

    def entry_tokens(word: str, before: int, times: int) -> int:
        """Count the tokens of `times` more entries of a word after `before` entries."""
        numbers = sum(number_tokens[len(str(before + entry))] for entry in range(1, times + 1))
        return times * count_tokens(" " + word) + numbers

    def build(budget: int) -> str:
        taken: list[str] = []
        for word in others:
            budget -= entry_tokens(word, repeats[0] * CWE_COMMON + repeats[1] * len(taken), repeats[1])
            if budget < 0:
                break
            taken.append(word)
        else:
            raise ValueError(f"length {request.length} is more than the {len(known)} words that cwe draws from can fill")
        return head + CWE_CONTEXT.format(context=_word_list(rng, common, taken, repeats))

    fixed = count_tokens(head + CWE_CONTEXT.format(context=""))
    fixed += sum(entry_tokens(word, repeats[0] * index, repeats[0]) for index, word in enumerate(common))
    return fit(request, [question], CWE_TOKENS, fixed, build)


def zeta_counts(total: int, size: int) -> list[int]:
    """Compute how often words of rank 1 to `size` occur in about `total` words: total / zeta(2) / rank^2, rounded down."""
    return [int(total / rank**FWE_ALPHA / _ZETA) for rank in range(1, size + 1)]


def frequent_words(request: Request) -> Document:
    """Build a fwe document of coded words under a Zeta law; its single question asks for ranks 2 to 4."""
    rng, words, count_tokens = request.rng, request.words, request.count_tokens
    count = max(5, (request.length - FWE_TOKENS) // FWE_VOCABULARY)
    vocabulary = [FWE_DOTS, *distinct(lambda: words.letters(rng, FWE_LETTERS), count)[1:]]
    tokens = [count_tokens(" " + word) for word in vocabulary]
    answers = tuple(vocabulary[1:4])
    question = Question(FWE_QUESTION, FWE_PREFIX, answers, " " + join_answers(answers) + ".")

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
        return FWE_CONTEXT.format(context=" ".join(body))

    return fit(request, [question], FWE_TOKENS, count_tokens(FWE_CONTEXT.format(context="")), build)
