"""The scorers of the tasks: the score of an output, given the references."""

from __future__ import annotations

import re
from collections.abc import Sequence


def score_all(prediction: str, answers: Sequence[str]) -> float:
    """RULER's `string_match_all`: share of references contained in the output, case-insensitive.

    Args:
        prediction: generated text; control characters count as line breaks, as in the suite.
        answers: references.

    Returns:
        Mean over references, in [0, 1].
    """
    return sum(_contained(prediction, answers)) / len(answers)


def score_any(prediction: str, answers: Sequence[str]) -> float:
    """RULER's `string_match_part`: 1.0 if any reference is contained in the output, case-insensitive."""
    return float(any(_contained(prediction, answers)))


def _contained(prediction: str, answers: Sequence[str]) -> list[bool]:
    cleaned = re.sub(r"[\x00-\x1f]", "\n", prediction).strip().lower()
    return [answer.lower() in cleaned for answer in answers]


def score_first_integer(prediction: str, answers: Sequence[str]) -> float:
    """InfiniteBench passkey and number string: the first run of digits equals the reference (1.0 or 0.0)."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and found.group() == answers[0])


def score_first_number(prediction: str, answers: Sequence[str]) -> float:
    """InfiniteBench math_find: the first number, with decimals or without, equals the reference (1.0 or 0.0)."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    return float(found is not None and float(found.group()) == float(answers[0]))


def score_first_word(prediction: str, answers: Sequence[str]) -> float:
    """Classification: the first word is the label, case-insensitive (1.0 or 0.0)."""
    found = re.search(r"\w+", prediction)
    return float(found is not None and found.group().lower() == answers[0].lower())


def score_value_among_words(prediction: str, answers: Sequence[str]) -> float:
    """InfiniteBench kv_retrieval: the value is one of the output's words once punctuation is blanked."""
    return float(answers[0] in re.sub(r"[\n:\"'.,?!{}]", " ", prediction).split())
