"""RULER's question answering (Hsieh et al. 2024, arXiv:2404.06654) over files that the user brings.

qa_1 reads the JSON of SQuAD (v2's development file in the suite; unanswerable questions are left out), and qa_2 the JSON of
HotpotQA's distractor setting. Other documents of the file are added to the documents with the answer until the length is
reached; a SQuAD article's other paragraphs come first.

Departures: documents are shuffled anew for every example, where the suite orders all examples of a size alike. If the file
has too few documents, documents without the answer are repeated. There is no training split.
"""

from __future__ import annotations

import itertools

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.fitting import fit
from experiments.tasks.qa_data import QA_DOCUMENT, SEPARATOR

QA_TOKENS = 32
QA_INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
QA_CONTEXT = QA_INSTRUCTION + "\n\nThe following are given documents.\n\n{context}"
QA_QUESTION = "\n\n" + QA_INSTRUCTION + "\n\nQuestion: {query}"
QA_PREFIX = " Answer:"


def qa(request: Request) -> Document:
    """Build a question-answering document; several questions are successive questions of the file.

    Raises:
        ValueError: the file has fewer questions than requested, or the length is too short for their documents.
    """
    rng, data = request.rng, request.haystack
    if request.num_questions > len(data.items):
        raise ValueError(
            f"{request.task}: the file has {len(data.items)} questions, got num_questions {request.num_questions}"
        )
    first = rng.randrange(len(data.items)) if request.index is None else request.index
    items = [data.items[(first + more) % len(data.items)] for more in range(request.num_questions)]
    questions = [
        Question(QA_QUESTION.format(query=item.query), QA_PREFIX, item.answers, " " + item.answers[0]) for item in items
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
        shown = (QA_DOCUMENT.format(number=number, document=text) for number, text in enumerate(merged, start=1))
        return QA_CONTEXT.format(context=SEPARATOR.join(shown))

    fixed = request.count_tokens(QA_CONTEXT.format(context="")) + sum(map(data.tokens, gold))
    return fit(request, questions, QA_TOKENS, fixed, build)
