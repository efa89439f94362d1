"""RULER's question answering (Hsieh et al. 2024, arXiv:2404.06654) over files that the user brings.

qa_1 reads the JSON of SQuAD (v2's development file in the suite; unanswerable questions are left out), qa_2 that of
HotpotQA's distractor setting. The documents that a question belongs to are padded with others of the file until the
length is reached; a SQuAD article's other paragraphs come first. Departures: documents are shuffled anew for every
example, where the suite orders all examples of a size alike, a file whose documents do not suffice repeats those that no
question belongs to, and there is no training split.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.ruler import fit

QA_TOKENS = 32
QA_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
QA_CONTEXT = QA_INSTRUCTION + "\n\nThe following are given documents.\n\n{context}"
QA_QUESTION = "\n\n" + QA_INSTRUCTION + "\n\nQuestion: {query}"
QA_PREFIX = " Answer:"
QA_DOCUMENT = "Document {number}:\n{document}"
_SEPARATOR = "\n\n"
FORMATS = {
    "squad": "SQuAD v2 JSON: {'data': [{'paragraphs': [{'context', 'qas': [{'question', 'answers', 'is_impossible'}]}]}]}",
    "hotpotqa": "HotpotQA distractor JSON: [{'question', 'answer', 'context': [[title, [sentence, ...]], ...]}]",
}


@dataclasses.dataclass(frozen=True)
class QaItem:
    """One question of a file.

    Attributes:
        query: the question.
        answers: references, any of which is right.
        documents: the texts it belongs to.
        related: other texts of the same article, the first to pad with.
    """

    query: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    related: tuple[str, ...] = ()


def _read_squad(data: Any) -> list[QaItem]:
    items = []
    for article in data["data"]:
        texts = tuple(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        for paragraph in article["paragraphs"]:
            related = tuple(text for text in texts if text != paragraph["context"])
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):  # v1.1 has no such field
                    items.append(QaItem(asked["question"], answers, (paragraph["context"],), related))
    return items


def _read_hotpotqa(data: Any) -> list[QaItem]:
    return [
        QaItem(
            asked["question"],
            (asked["answer"],),
            tuple(f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]),
        )
        for asked in data
    ]


_READERS: dict[str, Callable[[Any], list[QaItem]]] = {"squad": _read_squad, "hotpotqa": _read_hotpotqa}


class QaData:
    """The questions and the documents of one file.

    Args:
        kind: "squad" or "hotpotqa".
        items: the questions, in the file's order.
        count_tokens: text -> number of tokens, called once for every document that is used.
    """

    def __init__(self, kind: str, items: Sequence[QaItem], count_tokens: Callable[[str], int]) -> None:
        if not items:
            raise ValueError(f"the {kind} file holds no question that can be answered, expected at least one")
        self.kind = kind
        self.items = tuple(items)
        self.documents = tuple(sorted({text for item in items for text in (*item.documents, *item.related)}))
        self._count_tokens = count_tokens
        self._tokens: dict[str, int] = {}

    def tokens(self, document: str) -> int:
        """Tokens of a document with its heading; the number in it is taken to be of three digits."""
        if document not in self._tokens:
            shown = _SEPARATOR + QA_DOCUMENT.format(number=100, document=document)
            self._tokens[document] = self._count_tokens(shown)
        return self._tokens[document]


def load_questions(kind: str, source: str | None, count_tokens: Callable[[str], int]) -> QaData:
    """Reads a question file.

    Args:
        kind: "squad" or "hotpotqa".
        source: "file:PATH".
        count_tokens: text -> number of tokens.

    Returns:
        The questions and documents.

    Raises:
        ValueError: no file was named, or it is not of the format.
        FileNotFoundError: the file does not exist.
    """
    if source is None or not source.startswith("file:"):
        raise ValueError(
            f"the questions come from a file in {FORMATS[kind]}; expected haystack 'file:PATH', got {source!r}"
        )
    path = pathlib.Path(source.removeprefix("file:"))
    if not path.is_file():
        raise FileNotFoundError(f"question file not found: {path}")
    try:
        items = _READERS[kind](json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not in the expected format, {FORMATS[kind]} ({error!r})") from error
    return QaData(kind, items, count_tokens)


def qa(name: str, request: Request) -> Document:
    """One question-answering document; several questions are successive ones of the file.

    Args:
        name: "qa_1" or "qa_2".
        request: what to generate; `haystack` holds the questions.

    Returns:
        The document.

    Raises:
        ValueError: more questions than the file has, or the length is too short for their documents.
    """
    rng, data, count_tokens = request.rng, request.haystack, request.count_tokens
    if request.num_questions > len(data.items):
        raise ValueError(f"{name}: the file has {len(data.items)} questions, got num_questions {request.num_questions}")
    first = rng.randrange(len(data.items)) if request.index is None else request.index
    items = [data.items[(first + more) % len(data.items)] for more in range(request.num_questions)]
    questions = tuple(
        Question(QA_QUESTION.format(query=item.query), QA_PREFIX, item.answers, " " + item.answers[0]) for item in items
    )
    gold = list(dict.fromkeys(text for item in items for text in item.documents))
    related = list(dict.fromkeys(text for item in items for text in item.related if text not in gold))
    taken = {*gold, *related}
    others = [text for text in data.documents if text not in taken]
    room = request.answer_room(questions, QA_TOKENS)
    fixed = count_tokens(QA_CONTEXT.format(context="")) + room + request.question_tokens(questions)
    fixed += sum(data.tokens(text) for text in gold)

    def build(budget: int) -> Document:
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
        shown = (QA_DOCUMENT.format(number=number, document=text) for number, text in enumerate(merged, start=1))
        return Document(name, QA_CONTEXT.format(context=_SEPARATOR.join(shown)), questions, QA_TOKENS)

    return fit(request, build, fixed, room)
