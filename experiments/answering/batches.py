"""Batches of requests of any length: what they are padded to, and a tally of what they took."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import kvjax
from experiments.answering.ask import account

_log = logging.getLogger(__name__)


def padded_length(tokens: int, smallest: int = 128) -> int:
    """A length of which there are few, so that few programs are compiled: four per doubling, multiples of ``smallest``."""
    step = max(smallest, (1 << max(tokens - 1, 0).bit_length()) >> 3)
    return -(-tokens // step) * step


class Tally:
    """Accounting per request, tokens, and how many prompts were cut.

    Args:
        rows: rows of every batch.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._stats: list[tuple[int, kvjax.Stats]] = []
        self._tokens = 0
        self._truncated = 0

    def cut(self, prompts: Sequence[Sequence[int]], most: int) -> None:
        """Count prompts of more than ``most`` tokens."""
        self._truncated += sum(len(prompt) > most for prompt in prompts)

    def add(self, real: int, stats: kvjax.Stats, tokens: int) -> None:
        """Count one batch, of which the first ``real`` rows are requests, and the tokens generated or scored for them."""
        self._stats.append((real, stats))
        self._tokens += tokens

    def summary(self, room: str) -> dict[str, Any]:
        """JSON values; the log says if prompts were cut, and that it was to make ``room``."""
        requests = sum(real for real, _ in self._stats)
        if self._truncated:
            _log.warning("%d of %d requests lost their beginning to make room for %s", self._truncated, requests, room)
        counts = {"requests": requests, "tokens": self._tokens, "truncated": self._truncated}
        return counts | (account(self._stats, self._rows) if requests else {})
