"""Long generation: list the values of all records of a text, in the order in which they appear.

No suite has this task. Most long-context tasks end after a few decode steps, which says little about a method that selects
anew at every step. Here the answer fills a share of the length, so it takes thousands of steps, and the record that the next
token depends on moves through the text from step to step.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Sequence

from experiments.tasks.base import Document, Question, Request, TooShort
from experiments.tasks.fitting import fit, insert
from experiments.tasks.words import distinct

LISTING_CONTEXT = (
    "Some records are hidden within the following text. Every record gives the value of one key. "
    "Memorize all of them in the order in which they appear. I will ask you to list them afterwards.\n{context}"
)
LISTING_NEEDLE = "Record of {name}: the value of {key} is {value}."
LISTING_QUESTION = (
    "\nList the values of all keys in the records of {name}, in the order in which the records appear in the text. "
    "Give the values only, separated by commas, and leave none out."
)
LISTING_PREFIX = " The values in the records of {name}, in order, are:"


@dataclasses.dataclass(frozen=True)
class ListingSpec:
    """How long the answers are.

    Attributes:
        values: kind of value, "uuids" or "numbers".
        share: tokens of the answers to all questions about a context / tokens of the length.
        most: most tokens of the answers to all questions about a context.
        slack: extra tokens that may be generated, for numbers or other separators / tokens of the answer.
    """

    values: str = "uuids"
    share: float = 0.25
    most: int = 8192
    slack: float = 0.125


LISTING = ListingSpec()


def score_in_order(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the references that the output has in order, by the longest common subsequence.

    The output is cut into words (letters, digits, hyphens), which are compared with the references without regard to case. A
    skipped or wrong value costs only itself. Values out of order cost all values outside of the longest subsequence in order.
    Words that are no reference cost nothing, so numbers and remarks are harmless.

    Returns:
        Length of the longest common subsequence over the number of references, in [0, 1].
    """
    indices: dict[str, list[int]] = {}
    for index, answer in enumerate(answers):
        indices.setdefault(answer.lower(), []).append(index)
    # The words of the output give a sequence of indices of references; its longest increasing subsequence is the score. A
    # word that is several references gives its indices in descending order, so that it counts only once.
    ends: list[int] = []
    for word in re.findall(r"\w+(?:-\w+)*", prediction.lower()):
        for index in reversed(indices.get(word, [])):
            at = bisect.bisect_left(ends, index)
            ends[at : at + 1] = [index]
    return len(ends) / len(answers)


def listing(spec: ListingSpec, request: Request) -> Document:
    """Hide records in prose, as many as fill the wanted share with answers; each question has records of its own name."""
    rng, words, haystack, count_tokens = request.rng, request.words, request.haystack, request.count_tokens
    owners = distinct(lambda: rng.choice(words.nouns), request.num_questions)
    asked = [(LISTING_QUESTION.format(name=name), LISTING_PREFIX.format(name=name)) for name in owners]
    fixed = count_tokens(LISTING_CONTEXT.format(context="")) + sum(count_tokens("".join(texts)) for texts in asked)

    def answer_tokens(tokens: int) -> int:
        return tokens + int(spec.slack * tokens) + 1  # end of sequence

    limit = min(int(spec.share * request.length), spec.most)
    records: list[tuple[str, str]] = []  # owner and value, in the order of the text
    needles: list[str] = []
    seen: set[str] = set()
    needle_tokens = value_tokens = 0
    while True:
        owner = owners[len(records) % len(owners)]
        key, value = words.word(rng), words.distinct(spec.values, 1, rng)[0]
        if key in seen or value in seen:
            continue
        text = LISTING_NEEDLE.format(name=owner, key=key, value=value)
        needle_tokens += count_tokens(haystack.separator + text)
        value_tokens += count_tokens(f" {value},")
        room = answer_tokens(value_tokens)
        if room > limit or fixed + needle_tokens + room > request.length:
            break
        seen |= {key, value}
        records.append((owner, value))
        needles.append(text)
    if len(records) < len(owners):
        raise TooShort(
            f"length {request.length} is too short: {len(records)} records fit, {len(owners)} questions need one each"
        )
    shuffled = rng.sample(range(len(records)), len(records))
    records, needles = [records[i] for i in shuffled], [needles[i] for i in shuffled]
    questions = []
    for owner, (question, prefix) in zip(owners, asked, strict=True):
        answers = tuple(value for name, value in records if name == owner)
        questions.append(Question(question, prefix, answers, " " + ", ".join(answers) + "."))
    new_tokens = max(answer_tokens(count_tokens(question.target)) for question in questions)

    def build(budget: int) -> str:
        sentences = haystack.span(rng, budget)
        positions = sorted(rng.randrange(len(sentences) + 1) for _ in needles)
        return LISTING_CONTEXT.format(context=haystack.separator.join(insert(sentences, needles, positions)))

    fixed = count_tokens(LISTING_CONTEXT.format(context=""))
    fixed += sum(count_tokens(haystack.separator + text) for text in needles)
    return fit(request, questions, new_tokens, fixed, build)
