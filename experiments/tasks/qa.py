"""RULER's question answering (Hsieh et al. 2024, arXiv:2404.06654) over files that the user brings.

qa_1 reads the JSON of SQuAD (v2's development file in the suite; unanswerable questions are left out), and qa_2 the JSON of
HotpotQA's distractor setting. Other documents of the file are added to the documents with the answer until the length is
reached; a SQuAD article's other paragraphs come first.

Departures: documents are shuffled anew for every example, where the suite orders all examples of a size alike. If the file
has too few documents, documents without the answer are repeated.
"""

import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from experiments.tasks.base import PROMPTS, Document, Question, Request
from experiments.tasks.fitting import fit
from experiments.tasks.texts import reference_text

_DOCUMENT = PROMPTS["qa_1"].forms["document"]
_SEPARATOR = "\n\n"
FORMATS = {
    "squad": "SQuAD v2 JSON: {'data': [{'paragraphs': [{'context', 'qas': [{'question', 'answers', 'is_impossible'}]}]}]}",
    "hotpotqa": "HotpotQA distractor JSON: [{'question', 'answer', 'context': [[title, [sentence, ...]], ...]}]",
}


class QaItem(NamedTuple):
    """A question of a file: its references, the texts that contain the answer, and other texts of the same article."""

    query: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    related: tuple[str, ...] = ()


def _answers(asked: Any, answers: Iterable[Any]) -> tuple[str, ...]:
    """Return the references of a question, each once; the error for anything else names the question."""
    try:
        return tuple(dict.fromkeys(map(reference_text, answers)))
    except ValueError as error:
        raise ValueError(f"question {asked['question']!r:.80}: {error}") from error


def _squad(data: Any) -> Iterator[QaItem]:
    for article in data["data"]:
        texts = tuple(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        for paragraph in article["paragraphs"]:
            related = tuple(text for text in texts if text != paragraph["context"])
            for asked in paragraph["qas"]:
                answers = _answers(asked, (answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):  # v1.1 has no such field
                    yield QaItem(asked["question"], answers, (paragraph["context"],), related)


def _hotpotqa(data: Any) -> Iterator[QaItem]:
    for asked in data:
        documents = tuple(f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"])
        yield QaItem(asked["question"], _answers(asked, [asked["answer"]]), documents)


_READERS: dict[str, Callable[[Any], Iterator[QaItem]]] = {"squad": _squad, "hotpotqa": _hotpotqa}


class QaData:
    """The questions and the documents of one file, in the file's order.

    Args:
        items: the questions.
        count_tokens: text -> number of tokens; called once for every document that is used.

    Attributes:
        tokens: document -> number of its tokens.
    """

    def __init__(self, items: Sequence[QaItem], count_tokens: Callable[[str], int]) -> None:
        self.items = tuple(items)
        self.documents = tuple(sorted({text for item in items for text in (*item.documents, *item.related)}))
        # With its heading, as if the heading's number had three digits.
        self.tokens = functools.cache(lambda text: count_tokens(_SEPARATOR + _DOCUMENT.format(number=100, document=text)))


def load_questions(kind: str, source: str | None, count_tokens: Callable[[str], int]) -> QaData:
    """Read a question file, "file:PATH", of a kind of `FORMATS`."""
    if source is None or not source.startswith("file:"):
        raise ValueError(f"the questions come from a file in {FORMATS[kind]}; expected haystack 'file:PATH', got {source!r}")
    path = pathlib.Path(source.removeprefix("file:"))
    if not path.is_file():
        raise FileNotFoundError(f"question file not found: {path}")
    try:
        items = list(_READERS[kind](json.loads(path.read_text(encoding="utf-8-sig"))))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not in the expected format, {FORMATS[kind]} ({error!r})") from error
    if not items:
        raise ValueError(f"the {kind} file holds no question that can be answered, expected at least one")
    return QaData(items, count_tokens)


def qa(request: Request) -> Document:
    """Build a question-answering document; several questions are successive questions of the file.

    Raises:
        ValueError: the file has fewer questions than requested, or the length is too short for their documents.
    """
    rng, data, prompt = request.rng, request.haystack, request.prompt
    if request.num_questions > len(data.items):
        raise ValueError(
            f"{request.task}: the file has {len(data.items)} questions, got num_questions {request.num_questions}"
        )
    first = rng.randrange(len(data.items)) if request.index is None else request.index
    items = [data.items[(first + more) % len(data.items)] for more in range(request.num_questions)]
    questions = [
        Question(prompt.question.format(query=item.query), prompt.prefix, item.answers, " " + item.answers[0])
        for item in items
    ]
    gold = list(dict.fromkeys(text for item in items for text in item.documents))
    related = list(dict.fromkeys(text for item in items for text in item.related if text not in gold))
    taken = {*gold, *related}
    others = [text for text in data.documents if text not in taken]

    def build(budget: int) -> str:
        padding = rng.sample(related, len(related)) + rng.sample(others, len(others))
        chosen = []
        for text in itertools.cycle(padding):
            budget -= data.tokens(text)
            if budget < 0:
                break
            chosen.append(text)
        merged = [*gold, *chosen]
        rng.shuffle(merged)
        if request.depth is not None:
            merged.remove(gold[0])
            merged.insert(round(request.depth * len(merged)), gold[0])
        shown = (_DOCUMENT.format(number=number, document=text) for number, text in enumerate(merged, start=1))
        return prompt.context.format(context=_SEPARATOR.join(shown))

    fixed = request.count_tokens(prompt.context.format(context="")) + sum(map(data.tokens, gold))
    return fit(request, questions, fixed, build)
