"""The questions and documents of a SQuAD or HotpotQA file, which the user brings."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from experiments.tasks.references import reference_text

QA_DOCUMENT = "Document {number}:\n{document}"
SEPARATOR = "\n\n"
FORMATS = {
    "squad": "SQuAD v2 JSON: {'data': [{'paragraphs': [{'context', 'qas': [{'question', 'answers', 'is_impossible'}]}]}]}",
    "hotpotqa": "HotpotQA distractor JSON: [{'question', 'answer', 'context': [[title, [sentence, ...]], ...]}]",
}


@dataclasses.dataclass(frozen=True)
class QaItem:
    """A question of a file.

    Attributes:
        query: the question.
        answers: references; each one is right.
        documents: the texts that contain the answer.
        related: other texts of the same article, which come first as padding.
    """

    query: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    related: tuple[str, ...] = ()


def _answer(asked: Any, answer: Any) -> str:
    """Return a reference of a question; the error for anything else names the question."""
    try:
        return reference_text(answer)
    except ValueError as error:
        raise ValueError(f"question {asked['question']!r:.80}: {error}") from error


def _read_squad(data: Any) -> list[QaItem]:
    items = []
    for article in data["data"]:
        texts = tuple(dict.fromkeys(paragraph["context"] for paragraph in article["paragraphs"]))
        for paragraph in article["paragraphs"]:
            related = tuple(text for text in texts if text != paragraph["context"])
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(_answer(asked, answer["text"]) for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):  # v1.1 has no such field
                    items.append(QaItem(asked["question"], answers, (paragraph["context"],), related))
    return items


def _read_hotpotqa(data: Any) -> list[QaItem]:
    return [
        QaItem(
            asked["question"],
            (_answer(asked, asked["answer"]),),
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
        count_tokens: text -> number of tokens; called once for every document that is used.

    Attributes:
        tokens: document -> number of its tokens.
    """

    def __init__(self, kind: str, items: Sequence[QaItem], count_tokens: Callable[[str], int]) -> None:
        if not items:
            raise ValueError(f"the {kind} file holds no question that can be answered, expected at least one")
        self.items = tuple(items)
        self.documents = tuple(sorted({text for item in items for text in (*item.documents, *item.related)}))
        # With its heading, as if the heading's number had three digits.
        self.tokens = functools.cache(
            lambda document: count_tokens(SEPARATOR + QA_DOCUMENT.format(number=100, document=document))
        )


def load_questions(kind: str, source: str | None, count_tokens: Callable[[str], int]) -> QaData:
    """Read a question file.

    Args:
        source: "file:PATH".
    """
    if source is None or not source.startswith("file:"):
        raise ValueError(f"the questions come from a file in {FORMATS[kind]}; expected haystack 'file:PATH', got {source!r}")
    path = pathlib.Path(source.removeprefix("file:"))
    if not path.is_file():
        raise FileNotFoundError(f"question file not found: {path}")
    try:
        items = _READERS[kind](json.loads(path.read_text(encoding="utf-8-sig")))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not in the expected format, {FORMATS[kind]} ({error!r})") from error
    return QaData(kind, items, count_tokens)
