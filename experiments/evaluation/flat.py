"""Rows of results as flat values, for tables in CSV and for pandas."""

from __future__ import annotations

from typing import Any

from experiments.answering import budget_of, without_effect
from experiments.evaluation.comparison import BASELINE, Compared
from experiments.records import method_title


def flat(item: Compared) -> dict[str, Any]:
    """Make a row of plain values of a cell: the task, the method, its scores beside Full's, and what it cost."""
    row, full = item.row, item.row["method"] == BASELINE
    low, high = row["interval_95"]
    return {
        "task": row["name"],
        "length": row.get("length"),
        "depth": row.get("depth"),
        "question": row["question"],
        "title": method_title(row["method"].partition("(")[0]),
        "method": row["method"],
        "budget": budget_of(row),
        "score": row["value"],
        "score_low": low,
        "score_high": high,
        "against_full": None if full else item.difference,
        "against_full_low": None if full else item.interval_95[0],
        "against_full_high": None if full else item.interval_95[1],
        "same_answer": item.same,
        "examples": row.get("examples"),
        "answer_tokens": row.get("mean_answer_tokens"),
        "unfinished": row.get("unfinished"),
        "tokens_attended": row["attended_tokens"],
        "tokens": row["length_tokens"],
        "bytes_read": row["bytes_read_per_step"],
        "bytes_read_full": row["full_bytes_read_per_step"],
        "bytes_resident": row["resident_bytes_per_row"],
        "no_effect": without_effect(row),
        "seconds": row.get("seconds"),
        "knobs": row.get("knobs"),
    }
