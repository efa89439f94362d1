"""Files of NoLiMa, BABILong, Oolong and OpenAI's MRCR, as the suites distribute or log them, and their scorers.

One reader makes an example of each record (JSON lines, or another form of `records.ROWS`). The fields of a record:

* ``nolima`` (Modarressi et al. 2025, arXiv:2502.05167): `context` (a text that the suite's runner logs, with its needle),
  `question`, `gold_answers`, and `metric` if it is not EM. Scorer: `evaluation/async_evaluate.py`.
* ``babilong`` (Kuratov et al. 2024, arXiv:2406.10149): `input`, `question`, `target`; the file or its folder is named after a
  task, or a field `task` names it. Scorer: `babilong/metrics.py`.
* ``oolong`` (Bertsch et al. 2025, arXiv:2511.02817), the synthetic half: `context_window_text`, `question`, `answer`,
  `answer_type`. Scorer: `src/eval/eval_helpers.py`.
* ``mrcr`` (OpenAI, 2025): `prompt` (messages), `answer`, `random_string_to_prepend`. Scorer: the one of its dataset card.

Departures. The words around context and question are ours, and BABILong gets no examples of answers; `lm-eval:babilong_qa1`
has the harness' prompt and its looser scorer. Oolong's context is in the user's turn instead of the system's. The messages of
MRCR stand as text in one turn. Answers of MRCR have at most 1,024 tokens.
"""

import ast
import datetime
import difflib
import importlib
from collections.abc import Callable
from pathlib import Path

from experiments.benchmarks.records import ROWS, Record, object_of, parse_json, read_records
from experiments.tasks import Example, check_name

_ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
BABILONG_LABELS = {
    **dict.fromkeys(("qa1", "qa2", "qa3", "qa4", "qa11", "qa12", "qa13"), _ROOMS),
    "qa5": ("Bill", "Fred", "Jeff", "Mary", "apple", "football", "milk"),
    **dict.fromkeys(("qa6", "qa9", "qa17", "qa18"), ("no", "yes")),
    "qa7": ("none", "one", "three", "two"),
    "qa8": ("apple", "football", "milk", "nothing"),
    "qa10": ("maybe", "no", "yes"),
    "qa14": ("bedroom", "cinema", "kitchen", "office", "park", "school"),
    "qa15": ("cat", "mouse", "sheep", "wolf"),
    "qa16": ("gray", "green", "white", "yellow"),
    "qa19": ("e,e", "e,n", "e,s", "n,e", "n,n", "n,w", "s,e", "s,s", "s,w", "w,n", "w,s", "w,w"),
    "qa20": ("bedroom", "bored", "garden", "hungry", "kitchen", "thirsty", "tired"),
}
NOLIMA_METRICS = ("EM", "contains", "lastline_EM", "lastline_contains")
_COMPARISONS = ("more common", "less common", "same frequency")
_DATE = "[datetime.date(%Y, %m, %d)]"
_SHORT = 20  # characters of an answer that Oolong takes as it is
_NEARNESS = 0.75  # Oolong's score of a number that is wrong by 1; to the power of the distance


def nolima_score(metric: str) -> Callable[[str, Example], float]:
    """Make NoLiMa's score by one of its metrics: a reference equals the answer or is part of it, or of its last line."""

    def score(prediction: str, example: Example) -> float:
        whole = prediction if metric == "contains" else prediction.strip()
        text = whole.split("\n")[-1] if metric.startswith("lastline") else whole
        return float(any(answer == text if metric.endswith("EM") else answer in text for answer in example.answers))

    return score


def babilong_score(prediction: str, example: Example) -> float:
    """Score 1 if the answer's first sentence has the target's labels and no others, besides those in the question.

    The example's classes are the question as the file has it, and the labels.
    """
    question, *labels = map(str.lower, example.classes)
    # The suite also cuts at "Question" here, in a text without capitals.
    text = prediction.lower().split(".")[0].split("<context>")[0].split("<example>")[0]
    found, target = {label for label in labels if label in text and label not in question}, example.answers[0].lower()
    parts = _labels(target)
    return float(len(found) == len(parts) and found.issuperset(parts))


def _labels(target: str) -> list[str]:
    return target.split(",") if len(target) > 3 else [target]  # qa8 asks for several; "e,n" of qa19 is one label


def oolong_answer(prediction: str) -> str:
    """Return what Oolong reads: what follows the last colon without marks, or a comparison in it."""
    if ":" not in prediction:
        return prediction if len(prediction) < _SHORT else (prediction.split() or [""])[-1]
    text = prediction.split(":")[-1].strip()
    for mark in "*[]":
        text = text.replace(mark, "")
    return text if len(text) < _SHORT else next((words for words in _COMPARISONS if words in text), text)


def oolong_score(prediction: str, example: Example) -> float:
    """Score as Oolong does: equal, the named comparison, 0.75 to the power of a number's error, or an equal date."""
    text, reference, kind = oolong_answer(prediction), example.answers[0], example.classes[0]
    if text == reference:
        return 1.0
    try:
        if text in _COMPARISONS:
            return float(text in reference)
        if kind == "ANSWER_TYPE.NUMERIC":
            return _NEARNESS ** abs(int(reference) - int(text))
        if kind == "ANSWER_TYPE.DATE":
            return float(str(importlib.import_module("dateutil.parser").parse(text)) == reference)
    except (ValueError, OverflowError):  # no number, or no date
        return 0.0
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("scoring dates of Oolong needs the package 'python-dateutil'") from error
    return 0.0


def mrcr_score(prediction: str, example: Example) -> float:
    """Score MRCR: 0 without the random string in front, else the similarity of what follows it; it is the example's class."""
    (start,) = example.classes
    if not prediction.startswith(start):
        return 0.0
    texts = (text.removeprefix(start) for text in (prediction, example.answers[0]))
    return difflib.SequenceMatcher(None, *texts).ratio()


def _nolima(record: Record, path: Path) -> Example:
    metric = record.text("metric") if record.has("metric") else "EM"
    with record.named("metric"):
        check_name("metric of NoLiMa", metric, NOLIMA_METRICS)
    question = f"\n\nQuestion: {record.text('question')}\nGive the answer alone."
    answers = record.texts("gold_answers")
    return Example("nolima", record.text("context"), question, "", answers, 64, f"nolima_{metric}")


def _babilong(record: Record, path: Path) -> Example:
    names = (record.text("task"),) if record.has("task") else (path.stem, path.parent.name)
    task = next((name for name in names if name in BABILONG_LABELS), names[0])
    with record.named():
        check_name("task of BABILong", task, BABILONG_LABELS)
    asked, target = record.text("question"), record.reference("target")
    labels = [label.lower() for label in BABILONG_LABELS[task]]
    if not {*_labels(target.lower())} <= {*labels}:
        raise record.error(f"field 'target': expected labels of {task} ({', '.join(labels)}), got {target!r:.60}")
    question = f"\n\nQuestion: {asked.strip()}\nAnswer by the facts in the text alone, briefly."
    classes = (asked, *BABILONG_LABELS[task])
    return Example(f"babilong_{task}", record.text("input"), question, "", (target,), 20, "babilong", classes=classes)


def _oolong(record: Record, path: Path) -> Example:
    answer, kind = record.text("answer"), record.text("answer_type")
    with record.named("answer"):
        try:
            listed = [datetime.datetime.strptime(answer, _DATE)] if "datetime" in answer else ast.literal_eval(answer)
            if not isinstance(listed, list):
                raise TypeError(f"got {type(listed).__name__}")
            gold = listed[0]
        except (ValueError, SyntaxError, TypeError, IndexError, KeyError, RecursionError, MemoryError) as error:
            raise ValueError(f"expected a Python list of one answer or a date {_DATE}, got {answer!r:.60}") from error
    question, labels = f"\n\n{record.text('question')}", {"answer": kind.rpartition(".")[2].lower()}
    context = record.text("context_window_text")
    return Example("oolong", context, question, "", (str(gold),), 128, "oolong", classes=(kind,), labels=labels)


def _mrcr(record: Record, path: Path) -> Example:
    prompt = record.get("prompt", (str, list), "messages, or their JSON text")
    where = f"{record.where}: field 'prompt'"
    messages = (
        parse_json(record.text("prompt").encode(), where, "a JSON list of messages") if isinstance(prompt, str) else prompt
    )
    if not isinstance(messages, list) or len(messages) < 2:
        raise ValueError(f"{where}: expected at least 2 messages, got {prompt!r:.60}")
    turns = [object_of(f"{record.where}, message {at}", message) for at, message in enumerate(messages, 1)]
    texts = [f"{turn.text('role').capitalize()}: {turn.text('content')}" for turn in turns[:-1]]
    question, start = f"\n\n{turns[-1].text('content')}", record.text("random_string_to_prepend")
    labels = {"needles": record.get("n_needles", int, "a whole number")} if record.has("n_needles") else {}
    answers = (record.reference("answer"),)
    return Example("mrcr", "\n\n".join(texts), question, "", answers, 1024, "mrcr", classes=(start,), labels=labels)


EXAMPLES: dict[str, Callable[[Record, Path], Example]] = {
    "nolima": _nolima,
    "babilong": _babilong,
    "oolong": _oolong,
    "mrcr": _mrcr,
}


def examples_of(suite: str, path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of one of the suites.

    Args:
        suite: a name of `EXAMPLES`.
        path: a file of records, in a form of `ROWS`.
        limit: most records to read.
    """
    return [EXAMPLES[suite](record, path) for record in read_records(path, limit, ROWS)]
