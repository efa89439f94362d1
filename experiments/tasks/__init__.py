"""Synthetic long-context tasks: seeded, tokenizer-independent text in, exact scorer out."""

from __future__ import annotations

from experiments.tasks.base import Document, Question, Sample, Task, held_out
from experiments.tasks.haystack import Haystack, load_haystack
from experiments.tasks.registry import (
    GROUPS,
    TASKS,
    expand,
    get_task,
    haystack_for,
    make_document,
    make_documents,
    make_samples,
    score,
)
from experiments.tasks.words import Words

__all__ = [
    "GROUPS",
    "TASKS",
    "Document",
    "Haystack",
    "Question",
    "Sample",
    "Task",
    "Words",
    "expand",
    "get_task",
    "haystack_for",
    "held_out",
    "load_haystack",
    "make_document",
    "make_documents",
    "make_samples",
    "score",
]
