"""The suites' own scorers by name: the score of an example, given the text that a model wrote.

Sources: RULER `scripts/eval/synthetic/constants.py`, LongBench `LongBench/metrics.py` and `pred.py`, InfiniteBench
`src/compute_scores.py`, SCBench `scbench/compute_scores.py`, MInference and FranxYao's needle tests, Quest's passkey test;
for HELMET and the tasks of lm-evaluation-harness see the modules that are imported here.
Suites report means over examples times 100. A score here belongs to a single example, in [0, 1].
"""

from __future__ import annotations

import dataclasses
import decimal
import difflib
import functools
import re
import unicodedata
from collections.abc import Callable, Sequence

from experiments.benchmarks import harness_scores, helmet_scores, text_metrics
from experiments.benchmarks.base import Example
from experiments.tasks import score_all, score_any, score_code_line, score_first_integer, score_value_among_words

Scorer = Callable[[str, Example], float]


def _best(measure: Callable[[str, str], float], prediction: str, example: Example) -> float:
    """Score several references by LongBench's rule: the best score counts."""
    return max(measure(prediction, answer) for answer in example.answers)


def _first_line(scorer: Scorer, prediction: str, example: Example) -> float:
    """Score the first line, by LongBench's rule for few-shot tasks: a model continues with a next question."""
    return scorer(prediction.lstrip("\n").split("\n")[0], example)


def _english_f1(prediction: str, answer: str) -> float:
    words = (text_metrics.normalize_english(text).split() for text in (prediction, answer))
    return text_metrics.token_f1(*words)


def _chinese_word_f1(prediction: str, answer: str) -> float:
    cut = (map(text_metrics.normalize_chinese, text_metrics.chinese_words(text)) for text in (prediction, answer))
    return text_metrics.token_f1(*([word for word in words if word] for words in cut))


def _chinese_character_f1(prediction: str, answer: str) -> float:
    return text_metrics.token_f1(*(text_metrics.normalize_chinese(text) for text in (prediction, answer)))


def _chinese_rouge_l(prediction: str, answer: str) -> float:
    return text_metrics.rouge_l(*(" ".join(text_metrics.chinese_words(text)) for text in (prediction, answer)))


def _class_named(prediction: str, example: Example) -> float:
    """Score 1 / number of classes that the output names, if the right class is among them, else 0."""
    if not example.classes:
        raise ValueError(f"task {example.task!r}: classification needs the labels to choose from, got no classes")

    def score_one(answer: str) -> float:
        named = [name for name in example.classes if name in prediction]
        index = 0
        while index < len(named):  # as in LongBench's loop, dropping a name skips the next name
            if named[index] in answer and named[index] != answer:
                del named[index]
            index += 1
        return 1.0 / len(named) if answer in named else 0.0

    return max(map(score_one, example.answers))


def _share_of_numbers(prediction: str, answer: str) -> float:
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def _share_of_paragraphs(prediction: str, answer: str) -> float:
    return _share_of_numbers(prediction, _paragraph(answer))


def _paragraph(answer: str) -> str:
    """Return the number in a reference of passage retrieval."""
    found = re.search(r"(?:Paragraph |段落)(\d+)", answer)
    if found is None:
        raise ValueError(f"passage retrieval expects references like 'Paragraph 3' or '段落3', got {answer!r}")
    return found.group(1)


def _stated_choice(prediction: str, example: Example) -> float:
    """Score LongBench v2: the letter after "The correct answer is"; a letter in brackets comes first."""
    text = prediction.strip().replace("*", "")
    found = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(found is not None and found.group(1) in example.answers)


def _blanked(text: str, marks: Sequence[str]) -> str:
    for mark in marks:
        text = text.replace(mark, " ")
    return text


def _behind(text: str, openings: Sequence[str]) -> str | None:
    """Return the text after the first of `openings` that occurs, without its first character; None if none occurs."""
    for opening in openings:
        if opening in text:
            return text[text.index(opening) + len(opening) + 1 :]
    return None


def _letter(prediction: str, example: Example) -> float:
    """Score InfiniteBench's En.MC: the first character, else the text after "answer is" etc., else the first word A to D."""
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in example.answers)
    if text in example.answers:
        return 1.0
    text = re.sub(" +", " ", _blanked(text, "\n\"'.,?!{}"))
    rest = _behind(text, ("answer is:", "answer:", "answer is", "option is"))
    if rest is not None:
        return float(rest.startswith(example.answers))
    return float(next((word for word in text.split() if word in "ABCD"), None) in example.answers)


def _faulty_function(prediction: str, example: Example) -> float:
    """Score InfiniteBench's Code.Debug; the references are the function's name and its letter."""
    name, letter = _name_and_letter(example)
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(" +", " ", _blanked(text, ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    rest = _behind(text, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(rest is not None and rest.startswith((letter, name)))


def _name_and_letter(example: Example) -> tuple[str, str]:
    if len(example.answers) != 2:
        raise ValueError(f"Code.Debug expects a function's name and a letter as references, got {example.answers}")
    return example.answers[0], example.answers[1]


def _last_word_integer(prediction: str, example: Example) -> float:
    """Score InfiniteBench's Code.Run: the output's last word must be the value."""
    words = _blanked(prediction, "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == int(example.answers[0]))
    except ValueError:
        return 0.0


def _first_number(prediction: str, example: Example) -> float:
    """Score Math.Find of InfiniteBench and SCBench: the first number; its integer part if the reference is an integer."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    if found is None:
        return 0.0
    number, answer = decimal.Decimal(found.group()), decimal.Decimal(example.answers[0])
    if "." in example.answers[0] or answer != answer.to_integral_value():
        return float(float(number) == float(answer))  # as the suite reads them
    return float(number.to_integral_value(decimal.ROUND_FLOOR) == answer)  # exact, also above 2**53


def _leading_values(prediction: str, example: Example) -> float:
    """Score InfiniteBench's Math.Calc: the share of the intermediate values that are right before the first wrong one."""
    written = [digits.lstrip("0") or "0" for digits in re.findall("[0-9]+", prediction)]
    right = 0
    while right < min(len(written), len(example.answers)) and written[right] == example.answers[right]:
        right += 1
    return right / len(example.answers)


def _name_mentioned(prediction: str, example: Example) -> float:
    """Score InfiniteBench's En.Dia: the output must name one of the references, whatever the case and the punctuation.

    The suite's program of August 2024 takes any reference in any part of the output, also inside a word (ANN in Joanna). Here
    a name is one or several whole words. The program before that date knew only first references of one word. A name without
    a letter or a digit (???) is found where it stands in the output, as in the suite's program.
    """
    return float(any(_is_named(answer, prediction) for answer in example.answers))


def _is_named(name: str, prediction: str) -> bool:
    words = _words(name)
    return _runs_in(words, _words(prediction)) if words else name.strip() in prediction


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).upper())


def _runs_in(part: Sequence[str], whole: Sequence[str]) -> bool:
    """Tell whether the words stand in the other words, one after the other."""
    size = len(part)
    return size > 0 and any(whole[start : start + size] == part for start in range(len(whole) - size + 1))


def _passkey(prediction: str, example: Example) -> float:
    """Score Quest's passkey: the first integer, compared as a number."""
    found = re.search(r"\d+", prediction)
    try:
        return float(found is not None and int(found.group()) == int(example.answers[0]))
    except ValueError:  # Python refuses integers of more than 4,300 digits
        return 0.0


def _best_rouge(kind: str, stem: bool, prediction: str, example: Example) -> float:
    return text_metrics.google_rouge(prediction, example.answers, kind, stem)


_ENGLISH_F1 = functools.partial(_best, _english_f1)
_ROUGE_L = functools.partial(_best, text_metrics.rouge_l)

SCORERS: dict[str, Scorer] = {
    # RULER: share of references in the output, or any reference (qa); lower case, control characters are line breaks.
    "ruler_all": lambda prediction, example: score_all(prediction, example.answers),
    "ruler_part": lambda prediction, example: score_any(prediction, example.answers),
    # LongBench v1 and v2.
    "longbench_f1": _ENGLISH_F1,
    "longbench_f1_line": functools.partial(_first_line, _ENGLISH_F1),
    "longbench_f1_zh": functools.partial(_best, _chinese_word_f1),
    "longbench_rouge": _ROUGE_L,
    "longbench_rouge_line": functools.partial(_first_line, _ROUGE_L),
    "longbench_rouge_zh": functools.partial(_best, _chinese_rouge_l),
    "longbench_class_line": functools.partial(_first_line, _class_named),
    "longbench_count": functools.partial(_best, _share_of_numbers),
    "longbench_retrieval": functools.partial(_best, _share_of_paragraphs),
    "longbench_code": lambda prediction, example: score_code_line(prediction, example.answers),
    "longbench2_choice": _stated_choice,
    # InfiniteBench.
    "infinitebench_first_integer": lambda prediction, example: score_first_integer(prediction, example.answers),
    "infinitebench_kv": lambda prediction, example: score_value_among_words(prediction, example.answers),
    "infinitebench_choice": _letter,
    "infinitebench_f1": _ENGLISH_F1,
    "infinitebench_f1_zh": functools.partial(_best, _chinese_character_f1),
    "infinitebench_math_find": _first_number,
    "infinitebench_math_calc": _leading_values,
    "infinitebench_code_run": _last_word_integer,
    "infinitebench_code_debug": _faulty_function,
    "infinitebench_dialogue": _name_mentioned,
    "infinitebench_summary": functools.partial(_best_rouge, "rougeLsum", False),
    # SCBench, where it differs from InfiniteBench: containment, any reference in capitals, two decimals.
    "scbench_contains": lambda prediction, example: float(example.answers[0] in prediction),
    "scbench_any": lambda prediction, example: float(any(a.upper() in prediction.upper() for a in example.answers)),
    "scbench_vt": lambda prediction, example: round(score_all(prediction, example.answers), 2),
    "scbench_repoqa": lambda prediction, example: text_metrics.repeats_function(
        prediction, example.answers[0], example.classes
    ),
    # Needle in a haystack. ROUGE-1 is reported times 10 elsewhere; here it stays in [0, 1].
    "niah_number": lambda prediction, example: float(example.answers[0] in prediction),
    "niah_rouge1": functools.partial(_best_rouge, "rouge1", True),
    "quest_passkey": _passkey,
    "helmet_substring": lambda prediction, example: helmet_scores.contains_answer(prediction, example.answers),
    "helmet_ndcg10": lambda prediction, example: helmet_scores.ndcg10(prediction, example.answers),
    "lm-eval": harness_scores.score,
}
def check_scorer(name: str) -> None:
    """Refuse the name of an unknown scorer by a ValueError that gives the nearest known name."""
    if name not in SCORERS:
        near = difflib.get_close_matches(name, SCORERS, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown scorer {name!r}, did you mean {near!r}? expected one of {', '.join(SCORERS)}")


_WHOLE = re.compile(r"\s*\+?(-?[0-9]+)(?:\.0*)?\s*")
WHOLE_NUMBERS = (
    "infinitebench_first_integer", "infinitebench_math_calc", "infinitebench_code_run", "quest_passkey", "longbench_count",
)  # fmt: skip
# Look for a reference as it stands in an output, whose ends have no white space.
_CONTAINED = (
    "ruler_all", "ruler_part", "infinitebench_kv", "infinitebench_choice", "scbench_contains", "scbench_any", "scbench_vt",
    "niah_number",
)  # fmt: skip
# What some scorers read in an output. A reference of another form would make every answer wrong.
_READS = {
    **dict.fromkeys(("infinitebench_first_integer", "quest_passkey", "longbench_count"), "digits without a sign"),
    "infinitebench_math_find": "a number without a sign",
    "infinitebench_kv": "a word without any of : \" ' . , ? ! { }",
}
_DIGITS = 400  # more than a float can have before or behind the point
NUMERIC = (*WHOLE_NUMBERS, "infinitebench_math_find")  # compare numbers, whatever their form


def fitted(example: Example) -> Example:
    """Return an example with its references in the form that its scorer expects.

    Raises:
        ValueError: the scorer is unknown, or it can give no answer its due: a reference is no number where numbers are
            compared, there are too few or too many references, or the labels to choose from are missing.
    """
    check_scorer(example.scorer)
    answers, name = example.answers, example.scorer
    if not answers:
        raise ValueError("expected at least one reference, got none")
    if name in WHOLE_NUMBERS:
        found = [_WHOLE.fullmatch(answer) for answer in answers]
        if wrong := [answer for answer, number in zip(answers, found, strict=True) if number is None or len(answer) > 4000]:
            raise ValueError(f"the scorer {name!r} expects whole numbers as references, got {wrong[0]!r:.60}")
        answers = tuple(number.group(1) for number in found if number)
    elif name == "infinitebench_math_find":
        if wrong := [answer for answer in answers if not _is_number(answer)]:
            raise ValueError(f"the scorer {name!r} expects a number as reference, got {wrong[0]!r:.60}")
    elif name == "longbench_retrieval":
        for answer in answers:
            _paragraph(answer)
    elif name == "infinitebench_code_debug":
        _name_and_letter(example)
    elif name == "longbench2_choice" and not set(answers) <= set("ABCD"):
        raise ValueError(f"the scorer {name!r} expects A, B, C or D as reference, got {answers}")
    elif name in ("longbench_class_line", "scbench_repoqa") and not example.classes:
        raise ValueError(f"the scorer {name!r} needs the labels to choose from (a column 'all_classes'), got no classes")
    elif name == "longbench_class_line" and not any(SCORERS[name](answer, example) for answer in answers):
        raise ValueError(
            f"the scorer {name!r} expects a label of one line as reference, got {answers[0]!r:.60} and the labels "
            f"{', '.join(example.classes):.200}"
        )
    elif name in _CONTAINED:
        answers = tuple(answer.strip() for answer in answers)
    example = dataclasses.replace(example, answers=answers)
    plain = [format(decimal.Decimal(x), "f") for x in answers] if name == "infinitebench_math_find" else answers
    if name in _READS and not any(SCORERS[name](answer, example) for answer in plain):
        expected = f"references that it finds in an answer, {_READS[name]}"
        raise ValueError(f"the scorer {name!r} expects {expected}, got {answers[0]!r:.60}")
    return example


def _is_number(text: str) -> bool:
    try:
        number = decimal.Decimal(text)
    except decimal.InvalidOperation:
        return False
    return number.is_finite() and abs(number.adjusted()) < _DIGITS


def score(example: Example, prediction: str) -> float:
    """Score a model's text with the example's own scorer.

    Raises:
        ValueError: the scorer is unknown, or the example lacks the references or classes that its scorer needs.
        ModuleNotFoundError: the scorer needs a package of the extra 'eval' that is not installed.
    """
    check_scorer(example.scorer)
    if not example.answers:
        raise ValueError(f"task {example.task!r}: scoring needs at least one reference, got none")
    return float(SCORERS[example.scorer](prediction, example))
