"""The suites' own scorers by name: the score of an example, given the text that a model wrote.

Sources: RULER `scripts/eval/synthetic/constants.py`, LongBench `LongBench/metrics.py` and `pred.py`, InfiniteBench
`src/compute_scores.py`, SCBench `scbench/compute_scores.py`, MInference and FranxYao's needle tests, Quest's passkey test;
HELMET `utils.py`; `understanding` names those of four more suites; `harness` says how tasks of lm-evaluation-harness are
scored.
Suites report means over examples times 100. A score here belongs to a single example, in [0, 1].
"""

import dataclasses
import decimal
import operator
import re
import unicodedata
from collections.abc import Callable, Sequence

from experiments.benchmarks import harness, text_metrics, understanding
from experiments.benchmarks.records import Record
from experiments.tasks import TASKS, Example, check_name
from experiments.tasks.scorers import score_all, score_any, score_code_line, score_first_integer, score_value_among_words

Score = Callable[[str, Example], float]


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
    return _share_of_numbers(prediction, _PARAGRAPH.findall(answer)[0])


def _stated_choice(prediction: str, example: Example) -> float:
    """Score LongBench v2: the letter after "The correct answer is"; a letter in brackets comes first."""
    text = prediction.strip().replace("*", "")
    match = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return float(match is not None and match.group(1) in example.answers)


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
    name, letter = example.answers
    text = prediction.strip()
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = re.sub(" +", " ", _blanked(text, ("\n", "`", "'", '"', "-", "*", "Option", "option")))
    rest = _behind(text, ("answer is:", "is:", "answer:", "correct option is:"))
    return float(rest is not None and rest.startswith((letter, name)))


def _last_word_integer(prediction: str, example: Example) -> float:
    """Score InfiniteBench's Code.Run: the output's last word must be the value."""
    words = _blanked(prediction, "\n.`'\":").split()
    try:
        return float(bool(words) and int(words[-1]) == int(example.answers[0]))
    except ValueError:
        return 0.0


def _first_number(prediction: str, example: Example) -> float:
    """Score Math.Find of InfiniteBench and SCBench: the first number; its integer part if the reference is an integer."""
    match = re.search(r"\d+\.\d+|\d+", prediction)
    if match is None:
        return 0.0
    number, answer = decimal.Decimal(match.group()), decimal.Decimal(example.answers[0])
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
    text = _words(prediction)
    return float(any(words in text if (words := _words(x)).strip() else x.strip() in prediction for x in example.answers))


def _words(text: str) -> str:
    """Write the words of a text in capitals, each between spaces."""
    return f" {' '.join(re.findall(r'[^\W_]+', unicodedata.normalize('NFKC', text).upper()))} "


def _passkey(prediction: str, example: Example) -> float:
    """Score Quest's passkey: the first integer, compared as a number."""
    match = re.search(r"\d+", prediction)
    try:
        return float(match is not None and int(match.group()) == int(example.answers[0]))
    except ValueError:  # Python refuses integers of more than 4,300 digits
        return 0.0


def _rouge(kind: str, stem: bool) -> Score:
    return lambda prediction, example: text_metrics.google_rouge(prediction, example.answers, kind, stem)


def _of_all(measure: Callable[[str, Sequence[str]], float]) -> Score:
    """Make a score of a measure of a text and all references."""
    return lambda prediction, example: float(measure(prediction, example.answers))


def _best(measure: Callable[[str, str], float]) -> Score:
    """Make a score by LongBench's rule for several references: the best one counts."""
    return lambda prediction, example: max(measure(prediction, answer) for answer in example.answers)


def _first_line(score: Score) -> Score:
    """Make a score of the first line, by LongBench's rule for few-shot tasks: a model continues with a next question."""
    return lambda prediction, example: score(prediction.lstrip("\n").split("\n")[0], example)


# References as a scorer expects them

_WHOLE = re.compile(r"\s*\+?(-?[0-9]+)(?:\.0*)?\s*")
_PARAGRAPH = re.compile(r"(?:Paragraph |段落)(\d+)")
_DIGITS = 400  # more than a float can have before or behind the point
References = Callable[[Example], tuple[str, ...]]


def _stripped(example: Example) -> tuple[str, ...]:
    """Strip references that are looked for as they stand in an output, whose ends have no white space."""
    return tuple(answer.strip() for answer in example.answers)


def _of_form(form: Callable[[str], str | None], expected: str) -> References:
    """Expect references that each have a form; ``form`` returns the reference as it is read, or None for another form."""

    def references(example: Example) -> tuple[str, ...]:
        for answer in example.answers:
            if form(answer) is None:
                raise ValueError(f"{expected}, got {answer!r:.60}")
        return tuple(str(form(answer)) for answer in example.answers)

    return references


def _whole(answer: str) -> str | None:
    number = _WHOLE.fullmatch(answer)
    return number[1] if number and len(answer) <= 4000 else None


def _number(answer: str) -> str | None:
    try:
        number = decimal.Decimal(answer)
    except decimal.InvalidOperation:
        return None
    return answer if number.is_finite() and abs(number.adjusted()) < _DIGITS else None


def _name_and_letter(example: Example) -> tuple[str, ...]:
    if len(example.answers) != 2:
        raise ValueError(f"a function's name and a letter as references, got {example.answers}")
    return example.answers


def _among_classes(example: Example) -> tuple[str, ...]:
    if not example.classes:
        raise ValueError("the labels to choose from (a column 'all_classes'), got no classes")
    return example.answers


@dataclasses.dataclass(frozen=True)
class Scorer:
    """How a suite scores an answer.

    Attributes:
        score: the score of a text, in [0, 1].
        references: the example's references in the form that the score expects; ValueError if they have another form.
        reads: what the score reads in a text, in words, if a reference of another form would make every answer wrong.
        numeric: whether numbers are compared, whatever their form.
    """

    score: Score
    references: References = operator.attrgetter("answers")
    reads: str = ""
    numeric: bool = False


def _integer(score: Score, reads: str = "") -> Scorer:
    return Scorer(score, _of_form(_whole, "whole numbers as references"), reads, numeric=True)


_UNSIGNED = "digits without a sign"
_ENGLISH_F1, _ROUGE_L = _best(_english_f1), _best(text_metrics.rouge_l)

SCORERS: dict[str, Scorer] = {
    # RULER: share of references in the output, or any reference (qa); lower case, control characters are line breaks.
    "ruler_all": Scorer(_of_all(score_all), _stripped),
    "ruler_part": Scorer(_of_all(score_any), _stripped),
    # LongBench v1 and v2.
    "longbench_f1": Scorer(_ENGLISH_F1),
    "longbench_f1_line": Scorer(_first_line(_ENGLISH_F1)),
    "longbench_f1_zh": Scorer(_best(_chinese_word_f1)),
    "longbench_rouge": Scorer(_ROUGE_L),
    "longbench_rouge_line": Scorer(_first_line(_ROUGE_L)),
    "longbench_rouge_zh": Scorer(_best(_chinese_rouge_l)),
    "longbench_class_line": Scorer(_first_line(_class_named), _among_classes, "a label of one line"),
    "longbench_count": _integer(_best(_share_of_numbers), _UNSIGNED),
    "longbench_retrieval": Scorer(
        _best(_share_of_paragraphs),
        _of_form(lambda answer: answer if _PARAGRAPH.search(answer) else None, "references like 'Paragraph 3' or '段落3'"),
    ),
    "longbench_code": Scorer(_of_all(score_code_line)),
    "longbench2_choice": Scorer(
        _stated_choice,
        _of_form(lambda answer: answer if answer in ("A", "B", "C", "D") else None, "A, B, C or D as reference"),
    ),
    # InfiniteBench.
    "infinitebench_first_integer": _integer(_of_all(score_first_integer), _UNSIGNED),
    "infinitebench_kv": Scorer(_of_all(score_value_among_words), _stripped, "a word without any of : \" ' . , ? ! { }"),
    "infinitebench_choice": Scorer(_letter, _stripped),
    "infinitebench_f1": Scorer(_ENGLISH_F1),
    "infinitebench_f1_zh": Scorer(_best(_chinese_character_f1)),
    "infinitebench_math_find": Scorer(
        _first_number, _of_form(_number, "a number as reference"), "a number without a sign", numeric=True
    ),
    "infinitebench_math_calc": _integer(_leading_values),
    "infinitebench_code_run": _integer(_last_word_integer),
    "infinitebench_code_debug": Scorer(_faulty_function, _name_and_letter),
    "infinitebench_dialogue": Scorer(_name_mentioned),
    "infinitebench_summary": Scorer(_rouge("rougeLsum", False)),
    # SCBench, where it differs from InfiniteBench: containment, any reference in capitals, two decimals.
    "scbench_contains": Scorer(lambda prediction, example: float(example.answers[0] in prediction), _stripped),
    "scbench_any": Scorer(_of_all(lambda text, answers: any(x.upper() in text.upper() for x in answers)), _stripped),
    "scbench_vt": Scorer(_of_all(lambda text, answers: round(score_all(text, answers), 2)), _stripped),
    "scbench_repoqa": Scorer(
        lambda prediction, example: text_metrics.repeats_function(prediction, example.answers[0], example.classes),
        _among_classes,
    ),
    # Needle in a haystack. ROUGE-1 is reported times 10 elsewhere; here it stays in [0, 1].
    "niah_number": Scorer(lambda prediction, example: float(example.answers[0] in prediction), _stripped),
    "niah_rouge1": Scorer(_rouge("rouge1", True)),
    "quest_passkey": _integer(_passkey, _UNSIGNED),
    "helmet_substring": Scorer(_of_all(text_metrics.contains_answer)),
    "helmet_ndcg10": Scorer(_of_all(text_metrics.ndcg10)),
    **{f"nolima_{metric}": Scorer(understanding.nolima_score(metric)) for metric in understanding.NOLIMA_METRICS},
    "babilong": Scorer(understanding.babilong_score, _among_classes),
    "oolong": Scorer(understanding.oolong_score, _among_classes),
    "mrcr": Scorer(understanding.mrcr_score, _among_classes),
    "lm-eval": Scorer(harness.score),
}


def fitted(record: Record, example: Example) -> Example:
    """Return a record's example with its references in the form that its scorer expects.

    Raises:
        ValueError: the scorer can give no answer its due: a reference is no number where numbers are compared, there are
            too few or too many references, or the labels to choose from are missing.
    """
    scorer = SCORERS[example.scorer]
    try:
        example = dataclasses.replace(example, answers=scorer.references(example))
        plain = [format(decimal.Decimal(x), "f") for x in example.answers if scorer.numeric]  # as answers have numbers
        if scorer.reads and not any(scorer.score(text, example) for text in (*example.answers, *plain)):
            raise ValueError(f"references that it finds in an answer, {scorer.reads}, got {example.answers[0]!r:.60}")
    except ValueError as error:
        raise record.error(f"the scorer {example.scorer!r} expects {error}") from error
    return example


def score(example: Example, prediction: str) -> float:
    """Score a model's text as the example's task or suite does, in [0, 1].

    Raises:
        ValueError: the scorer is unknown, or the example lacks the references or classes that its scorer needs.
        ModuleNotFoundError: the scorer needs a package of the extra 'eval' that is not installed.
    """
    if example.scorer in TASKS:
        return TASKS[example.scorer].score(prediction, example.answers)
    check_name("scorer", example.scorer, SCORERS)
    if not example.answers:
        raise ValueError(f"task {example.task!r}: scoring needs at least one reference, got none")
    scorer = SCORERS[example.scorer]
    return float(scorer.score(prediction, dataclasses.replace(example, answers=scorer.references(example))))


def measures(example: Example, prediction: str) -> dict[str, float]:
    """Score an answer by the further measures of its task or scorer, each in [0, 1]; {} for tasks without."""
    if example.scorer in TASKS:
        return {name: measure(prediction, example.answers) for name, measure in TASKS[example.scorer].measures.items()}
    return dict(harness.results(prediction, example)) if example.scorer == "lm-eval" else {}
