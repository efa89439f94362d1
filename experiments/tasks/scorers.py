"""The scorers of the tasks: the score of an output, given the references."""

import bisect
import difflib
import itertools
import re
from collections.abc import Sequence


def score_all(prediction: str, answers: Sequence[str]) -> float:
    """Compute RULER's `string_match_all`: the share of references contained in the output, case-insensitive."""
    return sum(_contained(prediction, answers)) / len(answers)


def score_any(prediction: str, answers: Sequence[str]) -> float:
    """Compute RULER's `string_match_part`: 1.0 if the output contains any reference, case-insensitive, else 0.0."""
    return float(any(_contained(prediction, answers)))


def _contained(prediction: str, answers: Sequence[str]) -> list[bool]:
    cleaned = _cleaned(prediction)
    return [_cleaned(answer) in cleaned for answer in answers]


def _cleaned(text: str) -> str:
    return re.sub(r"[\x00-\x1f]", "\n", text).strip().lower()


def score_first_integer(prediction: str, answers: Sequence[str]) -> float:
    """Score InfiniteBench's passkey and number string: 1.0 if the first run of digits equals the reference, else 0.0."""
    match = re.search(r"[0-9]+", prediction)
    return float(match is not None and match.group() == answers[0])


def score_first_number(prediction: str, answers: Sequence[str]) -> float:
    """Score InfiniteBench's math_find: 1.0 if the first number, with or without decimals, equals the reference, else 0.0."""
    match = re.search(r"\d+\.\d+|\d+", prediction)
    return float(match is not None and float(match.group()) == float(answers[0]))


def score_first_word(prediction: str, answers: Sequence[str]) -> float:
    """Score a classification: 1.0 if the first word is the label, case-insensitive, else 0.0."""
    match = re.search(r"\w+", prediction)
    return float(match is not None and match.group().lower() == answers[0].lower())


def score_conclusion(prediction: str, answers: Sequence[str]) -> float:
    """Score what an answer ends with: 1.0 if its last word, or its last number for a number, is the reference, else 0.0."""
    found = re.findall(r"\d+" if answers[0].isdecimal() else r"\w+", prediction)
    return float(found[-1:] != [] and found[-1].lower() == answers[0].lower())


def score_leading_words(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the reference's words that the output begins with, without regard to case and punctuation."""
    words, wanted = (re.findall(r"\w+", text.lower()) for text in (prediction, answers[0]))
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(words, wanted, strict=False))
    return len(list(right)) / len(wanted)


def score_value_among_words(prediction: str, answers: Sequence[str]) -> float:
    """Score InfiniteBench's kv_retrieval: 1.0 if a word of the output without punctuation is the value, else 0.0."""
    return float(answers[0] in re.sub(r"[\n:\"'.,?!{}]", " ", prediction).split())


def common_length(written: Sequence[str], wanted: Sequence[str]) -> int:
    """Compute the length of the longest common subsequence of two lists."""
    indices: dict[str, list[int]] = {}
    for index, item in enumerate(wanted):
        indices.setdefault(item, []).append(index)
    # What is written gives a sequence of indices of what is wanted, whose longest increasing subsequence counts. An item that
    # is wanted several times gives its indices in descending order, so that it counts only once.
    ends: list[int] = []
    for item in written:
        for index in reversed(indices.get(item, [])):
            at = bisect.bisect_left(ends, index)
            ends[at : at + 1] = [index]
    return len(ends)


def score_in_order(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of the references that the output has in order, by the longest common subsequence.

    The output is cut into words (letters, digits, hyphens), which are compared with the references without regard to case. A
    skipped or wrong value costs only itself. Values out of order cost all values outside of the longest subsequence in order.
    Words that are no reference cost nothing, so numbers and remarks are harmless.
    """
    words = re.findall(r"\w+(?:-\w+)*", prediction.lower())
    return common_length(words, [answer.lower() for answer in answers]) / len(answers)


def code_similarity(prediction: str, reference: str) -> float:
    """Compute `fuzz.ratio` of the package fuzzywuzzy, a whole number of percent, as a fraction.

    LongBench's requirements name fuzzywuzzy without python-Levenshtein, and then its ratio is difflib's. Where
    python-Levenshtein is installed as well, fuzzywuzzy computes another measure, rapidfuzz's.

    Args:
        prediction: a line of code.

    Returns:
        0, 0.01, ... 1; equal lines give 1, an empty line and another line give 0.
    """
    return round(100 * difflib.SequenceMatcher(None, prediction, reference).ratio()) / 100


def first_code_line(prediction: str) -> str:
    """Return LongBench's line of an output: the first that is neither a comment nor the fence of a code block."""
    lines = prediction.lstrip("\n").split("\n")
    return next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")


def score_code_line(prediction: str, answers: Sequence[str]) -> float:
    """Score as LongBench's `code_sim_score`: the similarity of the output's first line of code, best over references."""
    return max(code_similarity(first_code_line(prediction), answer) for answer in answers)


def score_next_line(prediction: str, answers: Sequence[str]) -> float:
    """Score as `score_code_line`, without the indentation of the output's lines and the blank lines above them."""
    return score_code_line("\n".join(map(str.strip, prediction.strip().split("\n"))), answers)


def score_exact_line(prediction: str, answers: Sequence[str]) -> float:
    """Score RepoBench's exact match: the first line of code has the words of a reference, whatever the spaces."""
    words = first_code_line("\n".join(map(str.strip, prediction.strip().split("\n")))).split()
    return float(any(words == answer.split() for answer in answers))
