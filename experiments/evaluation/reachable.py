"""What is reachable at as many bytes: the scores of `kvjax.methods.Oracle`, and a method's share of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

ORACLE, BASELINE = "oracle", "full"
RANDOM = "random"  # the oracle's other end, a method like others
LEGEND = (
    "Of the oracle: the score over what the oracle reaches with as many bytes, by a line through its settings' scores over "
    "the logarithm of bytes up to Full's; empty where no oracle reads so little."
)


def family(label: str) -> str:
    """Return the method of a setting's label; an oracle that draws its tokens is `RANDOM`."""
    name = label.partition("(")[0]
    return RANDOM if name == ORACLE and "by=random" in label else name


def frontier(rows: Sequence[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """List the points (bytes, score) of the oracles that no oracle beats with as many bytes or fewer; Full's is the last.

    Args:
        rows: label, bytes and score of the settings of all methods on the same examples.

    Returns:
        The points, ascending; [] if no oracle is among the rows.
    """
    points: list[tuple[float, float]] = []
    for read, score in sorted((read, score) for label, read, score in rows if family(label) == ORACLE):
        if not points or score > points[-1][1]:
            points.append((read, score))
    full = [(read, score) for label, read, score in rows if label == BASELINE]
    return points + [(read, max(score, points[-1][1])) for read, score in full[:1] if points]


def shares(
    items: Sequence[Any], group: Callable[[Any], Any], point: Callable[[Any], tuple[str, float, float]]
) -> list[float | None]:
    """Compute for each item the percent of the oracle's score with as many bytes.

    Args:
        items: settings of methods.
        group: from an item to what it shares with the items that answered the same examples, as hashable.
        point: from an item to its label, bytes and score.

    Returns:
        A number for each item; None where no oracle read as few bytes, for Full and for the oracles themselves.
    """
    groups: dict[Any, list[tuple[str, float, float]]] = {}
    for item in items:
        groups.setdefault(group(item), []).append(point(item))
    curves = {key: frontier(rows) for key, rows in groups.items()}
    return [_share(curves[group(item)], *point(item)) for item in items]


def _share(curve: Sequence[tuple[float, float]], label: str, read: float, score: float) -> float | None:
    if not curve or read < curve[0][0] or label == BASELINE or family(label) == ORACLE:
        return None
    reached = float(np.interp(np.log(read), *zip(*((np.log(x), y) for x, y in curve), strict=True)))
    return 100 * score / reached if reached > 0 else None


def percent(value: float | None) -> str:
    """Format a share for a table."""
    return "" if value is None else f"{value:.0f} %"


def row_point(row: Mapping[str, Any], score: str = "value") -> tuple[str, float, float]:
    """Return label, bytes read in a step, and score of a row."""
    return row["method"], row["bytes_read_per_step"], row[score]
