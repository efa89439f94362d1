"""LongBench v2 (Bai et al. 2024, arXiv:2412.15204): 503 four-way questions in `data.json` or as jsonl."""

from __future__ import annotations

from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.records import Record, read_json_list, read_jsonl

# THUDM/LongBench prompts/0shot.txt, cut after the document.
CONTEXT = "Please read the following text and answer the question below.\n\n<text>\n{context}"
QUESTION = (
    "\n</text>\n\nWhat is the correct answer to this question: {question}\nChoices:\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\n\n"
    'Format your response as follows: "The correct answer is (insert answer here)".'
)
MAX_NEW_TOKENS = 128
LABELS = ("difficulty", "length", "domain")


def read_longbench2(path: Path, limit: int | None = None) -> list[Example]:
    """Read LongBench v2.

    Args:
        path: `.json` (a list) or `.jsonl`. Records have `question, choice_A ... choice_D, answer, context,
            difficulty, length, domain`.
    """
    records = (read_json_list if path.suffix == ".json" else read_jsonl)(path, limit)
    return [record.fitted(_example(record)) for record in records]


def _example(record: Record) -> Example:
    answer = record.text("answer")
    if answer not in ("A", "B", "C", "D"):
        raise record.error(f"expected A, B, C or D in the field 'answer', got {answer!r}")
    choices = {letter: record.text(f"choice_{letter}").strip() for letter in "ABCD"}
    context = CONTEXT.format(context=record.text("context").strip())
    question = QUESTION.format(question=record.text("question").strip(), **choices)
    labels = {name: record.text(name) for name in LABELS}
    return Example("longbench2", context, question, "", (answer,), MAX_NEW_TOKENS, "longbench2_choice", labels=labels)
