"""HELMET's scores of an answer: a reference in the text, and the quality of a ranking (princeton-nlp/HELMET `utils.py`)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

from experiments.benchmarks.text_metrics import normalize_english


def contains_answer(prediction: str, answers: Sequence[str]) -> float:
    """Score 1.0 if the text holds a reference, without case, punctuation and articles, else 0.0."""
    text = normalize_english(prediction)
    return float(any(normalize_english(answer) in text for answer in answers))


def ranked_ids(prediction: str) -> list[str]:
    """Return the numbers of the longest chain ``3 > 1 > 2`` of a text, each once; brackets, colons and ``ID`` are ignored."""
    text = re.sub(r"[\[\]:]", "", prediction).lower().replace("id", "")
    chains = (match.group(0) for match in re.finditer(r"(\d+)(?:\s*>\s*(\d+))*", text))
    longest = max(chains, key=len, default="")
    return list(dict.fromkeys(part.strip() for part in longest.split(">") if part.strip().isdigit()))


def ndcg10(prediction: str, answers: Sequence[str]) -> float:
    """Compute NDCG at 10 of a ranking, as trec_eval does: a passage's relevance over the logarithm of its place.

    Args:
        answers: the right ranking, and a JSON object of each passage's relevance.
    """
    relevance: dict[str, int] = json.loads(answers[1])

    def gain(values: Sequence[int]) -> float:
        return sum(value / math.log2(place + 1) for place, value in enumerate(values[:10], 1))

    best = gain(sorted(relevance.values(), reverse=True))
    return gain([relevance.get(number, 0) for number in ranked_ids(prediction)]) / best if best else 0.0
