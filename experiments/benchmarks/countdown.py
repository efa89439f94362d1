"""LongProc's countdown: the search that its prompts demonstrate, and the score of a search and of its solution.

The numbers and the target are in the file; the search that leads to the target is computed, word for word as LongProc's
program does (princeton-pli/LongProc @4339702, `longproc/countdown_evaluator.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

DEMONSTRATED = (((40, 19, 23, 7), 29), ((9, 16, 6, 18), 12))
_MOST = 2000  # intermediate results from this number on are dropped
_EQUATION = re.compile(r"\s*(\d{1,9})\s*([+*/-])\s*(\d{1,9})\s*=\s*(-?\d{1,9})\s*")

Number = int | float
Step = tuple[Number | None, str]  # the result, None if it is undefined, and the equation


def _steps(one: Number, other: Number) -> Iterator[Step]:
    """Yield the four operations on two numbers, the larger first."""
    a, b = max(one, other), min(one, other)
    yield a + b, f"{a} + {b} = {a + b}"
    yield a - b, f"{a} - {b} = {a - b}"
    yield a * b, f"{a} * {b} = {a * b}"
    if b == 0:
        yield None, f"{a} / {b} (invalid operation)"
    elif a % b == 0:
        yield int(a / b), f"{a} / {b} = {int(a / b)}"
    else:
        yield a / b, f"{a} / {b} = {a / b:.1f}"


def _pairs(numbers: Sequence[Number]) -> list[tuple[Number, Number, list[Number]]]:
    """List the pairs of numbers in order, each with the numbers that are left."""
    places = range(len(numbers))
    return [
        (numbers[i], numbers[j], [numbers[k] for k in places if k not in (i, j)])
        for i in places for j in places if i < j
    ]  # fmt: skip


def _indent(level: int) -> str:
    return " " * level + "|- " if level else ""


def _search(numbers: list[Number], target: int, step: Step | None, level: int, log: list[str]) -> list[str] | None:
    """Search depth-first and log it; return the equations that reach the target, or None."""
    if step is not None:
        result, equation = step
        tried = f"\n{_indent(level)}Try {equation}."
        if result is None:
            return _dropped(log, f"{tried} drop this branch.")
        if result % 1 != 0:
            return _dropped(log, f"{tried} {result:.1f} is a decimal, drop this branch.")
        if result >= _MOST:
            return _dropped(log, f"{tried} {result} exceeds the maximum intermediate result, drop this branch.")
        if len(numbers) == 1:
            if result != target:
                return _dropped(log, f"{tried} Evaluate {result} != {target}, drop this branch.")
            log.append(f"{tried} Evaluate {result} == {target}, target found!")
            return []
        log.append(f"{tried} Add {result} to the number set.")
    pairs = _pairs(numbers)
    if len(numbers) == 2:
        log.append(f" Current number set: {numbers}, target: {target}, just two numbers left.")
    else:
        options = [(a, b) for a, b, _ in pairs]
        opening = "Initial number set" if step is None else " Current number set"
        log.append(f"{opening}: {numbers}, target: {target}. Options for choosing two numbers: {options}.")
        level += 1
    for a, b, left in pairs:
        if len(numbers) > 2:
            log.append(f"\n{_indent(level)}Pick two numbers ({a}, {b}) (numbers left: {left}). Try possible operations.")
        for made in _steps(a, b):
            found = _search([made[0] if made[0] is not None else -1, *left], target, made, level + 1, log)
            if found is not None:
                return [made[1], *found]
    return None


def _dropped(log: list[str], line: str) -> None:
    log.append(line)


def demonstration(numbers: Sequence[int], target: int) -> str:
    """Write the search for a target and its solution, as LongProc's prompts show it.

    Raises:
        ValueError: the numbers do not reach the target.
    """
    log: list[str] = []
    found = _search(list(numbers), target, None, 0, log)
    if found is None:
        raise ValueError(f"expected numbers that reach the target {target}, got {list(numbers)}")
    first, before, last = found
    return (
        "# Search Procedure\n" + "".join(log) + "\n\nNow we have found the target, let's trace back the solution:\n"
        f"Final step: {last}\nThe step before: {before}\nThe first step: {first}\n\n"
        f"Output the solution in the required format:\n<Solution>\n{first}\n{before}\n{last}\n</Solution>\n"
    )


def solves(numbers: Sequence[int], target: int, solution: str) -> bool:
    """Tell whether three equations use each number once and reach the target."""
    left, lines = list(numbers), solution.split("\n")
    if len(lines) != 3:
        return False
    for line in lines:
        found = _EQUATION.fullmatch(line)
        if found is None:
            return False
        a, sign, b, result = int(found[1]), found[2], int(found[3]), int(found[4])
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]
        if value != result or a not in left:
            return False
        left.remove(a)
        if b not in left:
            return False
        left.remove(b)
        left.append(result)
    return left[0] == target


def search_share(procedure: str, right: str) -> float:
    """Compute the share of the lines of a search before the first wrong action, as LongProc counts it.

    An action is wrong if it picks other numbers, calculates with other numbers, or drops another branch. What it says the
    result is does not matter.

    Args:
        procedure: the search of a model, behind its heading.
        right: the right search.
    """
    written, lines = procedure.strip().split("\n"), right.strip().split("\n")
    if written[0] != lines[0] or len(lines) == 1:
        return 0.0
    pairs = list(zip(written[1:], lines[1:], strict=False))
    wrong = (at for at, (line, wanted) in enumerate(pairs) if not _same_action(line, wanted))
    return max(next(wrong, len(pairs) - 1), 0) / (len(lines) - 1)


def _same_action(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    numbers = "|- Try" in wanted and line.split("=")[0] == wanted.split("=")[0]
    return numbers and ("drop this branch" in line) == ("drop this branch" in wanted)
