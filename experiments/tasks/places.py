"""The score of an answer by place: the share of the right steps that it has in each quarter of the right answer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

QUARTERS = 4


def quarter_shares(right: Sequence[bool]) -> list[float]:
    """Compute the share of right steps in each quarter of a right answer.

    Args:
        right: for each step of the right answer, whether a written answer has it.

    Returns:
        Four shares, 0 to 1. A step that lies in two quarters counts in each by its part, so the mean of the four is the share
        of all steps that are right.
    """
    until = np.cumsum([0.0, *right]) / len(right)
    ends = np.interp(np.linspace(0.0, 1.0, QUARTERS + 1), np.linspace(0.0, 1.0, len(right) + 1), until)
    return [float(share) for share in np.clip(QUARTERS * np.diff(ends), 0.0, 1.0)]
