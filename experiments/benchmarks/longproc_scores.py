"""LongProc's scores of an answer (Ye et al. 2025, arXiv:2501.05414), except for code and for travel plans.

Source: princeton-pli/LongProc @4339702, `longproc/longproc_data.py`, `html_to_tsv_evaluator.py`, `tom_tracking_evaluator.py`
and `countdown_evaluator.py`. ``exact`` is its accuracy, ``partial`` its partial accuracy. As there, the first wrong line of a
route counts as right in ``partial``.
"""

from __future__ import annotations

import csv
import json
import re
import string
from collections.abc import Sequence

from experiments.benchmarks.countdown import search_share, solves
from experiments.benchmarks.text_metrics import normalize_english

_TOM_WORDS = re.compile(
    r"\b(a|an|the|on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)\b"
)


def tagged(text: str, tag: str) -> str | None:
    """Return what stands between ``<tag>`` and ``</tag>``; None if one of both is missing."""
    start, end = text.find(f"<{tag}>"), text.find(f"</{tag}>")
    return None if min(start, end) < 0 else text[start + len(tag) + 2 : end].strip()


def route_exact(prediction: str, route: str) -> float:
    """Score a route: 1.0 if all lines between the tags are right, else 0.0."""
    return float(tagged(prediction, "Route") == route.strip())


def route_partial(prediction: str, route: str) -> float:
    """Compute the share of a route's lines up to the first wrong one, which the suite counts as right."""
    found = tagged(prediction, "Route")
    if found is None:
        return 0.0
    lines, written = route.strip().split("\n"), found.split("\n")
    pairs = list(zip(lines, written, strict=False))
    wrong = next((at for at, (right, line) in enumerate(pairs) if right != line), len(pairs) - 1)
    return (wrong + 1) / len(lines)


def table_f1(prediction: str, reference: str) -> float:
    """Compute F1 of the rows of a TSV table, in any order, without case, punctuation, articles and spaces."""
    found = re.search(r"```tsv([\s\S]*)```", prediction)
    text = found.group(1) if found else prediction.split("```tsv")[1] if "```tsv" in prediction else prediction
    rows, right = _rows(text), _rows(reference)
    if not rows or not right or len(rows[0]) != len(right[0]):
        return 0.0
    precision = sum(row in right for row in rows) / len(rows)
    recall = sum(row in rows for row in right) / len(right)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _rows(text: str) -> list[list[str]]:
    """Parse TSV below its header; a row of another width becomes N/A, and the last row is dropped if it has another width."""
    try:
        header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):
        return []
    width = len(header)
    if rows and len(rows[-1]) != width:
        del rows[-1]
    cells = (row if len(row) == width else ["N/A"] * width for row in rows)
    return [[normalize_english(cell).replace(" ", "") for cell in row] for row in cells]


def _beliefs(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip().startswith("-")]
    text = "\n".join(lines)
    start = max(text.rfind("- Step 0:"), 0)
    made = []
    for line in text[start:].strip().split("\n"):
        if re.match(r"- Step \d+:", line):
            content = "".join(mark for mark in line[1:].lower() if mark not in string.punctuation and mark != "’")
            made.append(" ".join(_TOM_WORDS.sub(" ", content).split()))
    return [belief for belief in made if belief]


def _right_beliefs(prediction: str, reference: str) -> tuple[int, int, int]:
    """Return the beliefs before the first wrong one, the beliefs that are written, and the beliefs of the reference."""
    written, right = _beliefs(prediction), _beliefs(reference)
    pairs = list(zip(written, right, strict=False))
    return next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs)), len(written), len(right)


def beliefs_exact(prediction: str, reference: str) -> float:
    """Score a trace of beliefs: 1.0 if all steps are right, else 0.0."""
    same, written, right = _right_beliefs(prediction, reference)
    return float(same == written == right)


def beliefs_partial(prediction: str, reference: str) -> float:
    """Compute the share of the steps of a trace before the first wrong one."""
    same, _, right = _right_beliefs(prediction, reference)
    return same / right if right else 0.0


def countdown_exact(prediction: str, answers: Sequence[str]) -> float:
    """Score a countdown: 1.0 if the solution between the tags is right, else 0.0.

    Args:
        prediction: generated text.
        answers: the right search with its solution, and a JSON object with "nums" and "target".
    """
    told, solution = json.loads(answers[1]), tagged(prediction, "Solution")
    return float(solution is not None and solves(told["nums"], told["target"], solution))


def countdown_partial(prediction: str, answers: Sequence[str]) -> float:
    """Compute the share of a search before its first wrong action; 1.0 for a right solution. Arguments as above."""
    if countdown_exact(prediction, answers):
        return 1.0
    if "# Search Procedure" not in prediction:
        return 0.0
    right = answers[0].split("# Search Procedure")[-1].split("Now we have found the target")[0]
    return search_share(prediction.split("# Search Procedure")[-1], right)
