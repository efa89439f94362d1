"""A tally of requests and their costs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import kvjax
from experiments.answering import account

_log = logging.getLogger(__name__)


class Tally:
    """A tally of requests, their tokens, their accounting, and the prompts that were cut.

    Args:
        rows: rows of every batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._stats: list[tuple[int, kvjax.Stats]] = []
        self._tokens = 0
        self._truncated = 0

    def cut(self, prompts: Sequence[Sequence[int]], most: int) -> None:
        """Count the prompts of more than ``most`` tokens."""
        self._truncated += sum(len(prompt) > most for prompt in prompts)

    def add(self, real: int, stats: kvjax.Stats, tokens: int) -> None:
        """Count a batch: its first ``real`` rows are requests, all later rows copies.

        ``tokens`` were generated or scored for them.
        """
        self._stats.append((real, stats))
        self._tokens += tokens

    def summary(self, room: str) -> dict[str, Any]:
        """Return the counts as JSON values; log a warning if prompts were cut to make room for ``room``."""
        requests = sum(real for real, _ in self._stats)
        if self._truncated:
            _log.warning("%d of %d requests lost their beginning to make room for %s", self._truncated, requests, room)
        counts = {"requests": requests, "tokens": self._tokens, "truncated": self._truncated}
        return counts | (account(self._stats, self._rows) if requests else {})
