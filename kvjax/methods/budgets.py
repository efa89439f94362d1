"""Budgets as functions of a text's length, for `Method.at_length`: the paper's where it fits, an eighth for the baselines."""

from typing import Any

SHARE = 8  # tokens of the context / tokens of a baseline's budget


def scaled(total: int, length: int) -> tuple[float, str]:
    """Compute a factor for budgets, and a note. A `total` above half of the length becomes a quarter of it, else it stays."""
    if 2 * total <= length:
        return 1.0, ""
    share = length / 4 / total
    return share, f"the paper's {total} tokens scaled by {share:.3f} to fit {length}"


def ends(length: int, first: int, last: int) -> tuple[int, int, int]:
    """Compute an eighth of the context, and the ``first`` and ``last`` tokens within it: at most half of it for both."""
    total = length // SHARE
    share = min(1.0, total / 2 / (first + last))
    return total, int(first * share), int(last * share)


def searched(length: int, num_sink: int, num_local: int, whose: str = "") -> tuple[dict[str, Any], str]:
    """Divide an eighth of the context between sinks, recent tokens and tokens that are found."""
    total, sinks, local = ends(length, num_sink, num_local)
    knobs = {"num_sink": sinks, "num_local": max(local, 1), "budget": total - sinks - max(local, 1)}
    return knobs, f"1/{SHARE} of the context{whose}, sinks and recent tokens too"
