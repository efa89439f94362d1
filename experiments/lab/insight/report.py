"""Formats the table of a record of `experiments.lab.insight`."""

from collections.abc import Mapping
from typing import Any

from experiments.records import method_title
from experiments.records.report import Column, row_table

_LEGEND = (
    "Percent, means over samples, layers, KV heads and steps. Attended: chosen tokens. Mass: share of exact attention on "
    "chosen tokens; answer: up to Full's EOS; worst head: the lowest mean of a KV head of a layer. Top k: share of the k "
    "tokens with most exact attention that are chosen; own: the same for as many tokens as are chosen. Agree: steps at which "
    "the method would have chosen Full's token, for all steps and for the steps of the answer."
)


_COLUMNS: dict[str, Column] = {
    "method": lambda row: method_title(row["method"]),
    "attended": ("attended_tokens", 1, ".0f"),
    "mass": ("value", 1, ".1f"),
    "answer": ("in_answer", 1, ".1f"),
    "worst head": ("worst_head", 1, ".1f"),
}


def table(record: Mapping[str, Any]) -> str:
    """Format the record of `experiments.lab.insight` as a Markdown table; the method with most mass comes first."""
    top: dict[str, Column] = {f"top {k}": lambda row, k=str(k): f"{row['top_k'][k]:.1f}" for k in record["settings"]["top"]}
    more: dict[str, Column] = {
        "own": ("own_k", 1, ".1f"),
        "agree": lambda row: f"{row['agreement']:.0f}, {row['agreement_in_answer']:.0f}",
        "note": "note",
    }
    rows = sorted(record["metrics"], key=lambda row: -row["value"])
    return "\n".join([*row_table(rows, _COLUMNS | top | more), "", _LEGEND])
