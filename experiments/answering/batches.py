"""Batches: the lengths that prompts are padded to, the rows of a batch, and a tally of requests and their costs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import kvjax
from experiments.answering.ask import account
from experiments.answering.mesh import equal_rows

_log = logging.getLogger(__name__)


def padded_length(tokens: int, smallest: int = 128) -> int:
    """Compute the length that a text is padded to: a multiple of ``smallest``, at most four lengths per doubling.

    Few lengths mean few compiled programs.
    """
    step = max(smallest, (1 << max(tokens - 1, 0).bit_length()) >> 3)
    return -(-tokens // step) * step


def most_rows(length: int, batch_tokens: int, groups: int = 1) -> int:
    """Compute the most rows that `batch_tokens` allow to generate together; a multiple of ``groups``, above 0."""
    return max(groups, batch_tokens // length // groups * groups)


def batch_rows(length: int, batch_tokens: int, samples: int, groups: int = 1) -> int:
    """Compute the rows that are generated together, so that batches of ``samples`` rows are as equal as possible.

    They are a multiple of ``groups`` (`LoadedModel.groups`), and at most ``batch_tokens`` tokens unless each group has one
    row.
    """
    batches = -(-samples // most_rows(length, batch_tokens, groups))
    return equal_rows(-(-samples // batches), groups)


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
