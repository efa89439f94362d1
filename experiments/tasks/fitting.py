"""How a document is made as long as its limit allows."""

from __future__ import annotations

from collections.abc import Callable

from experiments.tasks.base import Document, Request


def insert(sentences: list[str], needles: list[str], positions: list[int]) -> list[str]:
    """Puts needle i in front of sentence `positions[i]`; equal positions keep the order of the needles."""
    order = sorted(range(len(needles)), key=positions.__getitem__)
    merged: list[str] = []
    start = 0
    for index in order:
        merged += sentences[start : positions[index]]
        merged.append(needles[index])
        start = positions[index]
    return merged + sentences[start:]


def fit(request: Request, build: Callable[[int], Document], fixed: int, room: int) -> Document:
    """Builds a document that fits `request.length`, shrinking the haystack until its first prompt does.

    Training does not count the finished prompt: it counts what it encodes instead.

    Args:
        request: the limit and the token counter.
        build: haystack tokens -> document.
        fixed: tokens of everything but the haystack, `room` included.
        room: tokens reserved for the answers.

    Returns:
        The document.

    Raises:
        ValueError: the needles and the question alone are longer than `request.length`.
    """
    length = request.length
    budget = length - fixed
    if budget < 0:
        raise ValueError(f"length {length} is too short: the task needs {-budget} tokens more for its fixed parts")
    document = build(budget)
    while not request.training:
        sample = document.samples()[0]
        excess = request.count_tokens(sample.prompt) + room - length
        if excess <= 0:
            break
        budget -= excess
        if budget < 0:
            raise ValueError(f"length {length} is too short: the task needs {-budget} tokens more")
        document = build(budget)
    return document
