"""Bootstrap intervals of a mean over examples. Groups of examples may share a context."""

import functools
from collections.abc import Sequence

import numpy as np

_RESAMPLES = 4000


def bootstrap_interval(values: Sequence[float], groups: Sequence[str] = ()) -> tuple[float, float]:
    """Compute the 95 % percentile interval of the mean.

    Equal values have an interval without width, which says nothing. ``groups`` has a text for each value, or nothing. Values
    of equal text share a context and are drawn together: questions about the same context succeed and fail together, so more
    questions are not more contexts. "" is a group of its own.
    """
    names = [group or f"\0{index}" for index, group in enumerate(groups)] if groups else range(len(values))
    _, members = np.unique(list(names), return_inverse=True)
    sums = np.bincount(members, weights=np.asarray(values, np.float64))
    counts = np.bincount(members).astype(np.int64)
    return _ends(sums.tobytes(), counts.tobytes())


def percent_interval(scores: Sequence[float], groups: Sequence[str] = ()) -> list[float]:
    """Compute `bootstrap_interval` of scores from 0 to 1 in percent, as rows of a record have it."""
    return [round(100 * end, 2) for end in bootstrap_interval(scores, groups)]


@functools.lru_cache(maxsize=8192)
def _ends(sums: bytes, counts: bytes) -> tuple[float, float]:
    """Compute `bootstrap_interval` from float64 sums and int64 counts of the groups; pages show many cells repeatedly."""
    total, size = np.frombuffer(sums, np.float64), np.frombuffer(counts, np.int64)
    drawn = _drawn(len(total))
    drawn_size = len(size) if (size == 1).all() else size[drawn].sum(axis=1)
    low, high = np.percentile(total[drawn].sum(axis=1) / drawn_size, [2.5, 97.5])
    return float(low), float(high)


@functools.lru_cache(maxsize=8)
def _drawn(count: int) -> np.ndarray:
    """Draw the groups of every resample, int [_RESAMPLES, count]. Cells share the draws, because drawing takes longest."""
    return np.random.default_rng(0).integers(0, count, (_RESAMPLES, count))
