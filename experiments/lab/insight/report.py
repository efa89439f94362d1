"""Formats the table of a record of `experiments.lab.insight`."""

from __future__ import annotations

from typing import Any

from experiments.records import markdown_rows, method_title

_LEGEND = (
    "Percent, means over samples, layers, KV heads and steps. Attended: chosen tokens. Mass: share of exact attention on "
    "chosen tokens; answer: up to Full's EOS; worst head: the lowest mean of a KV head of a layer. Top k: share of the k "
    "tokens with most exact attention that are chosen; own: the same for as many tokens as are chosen. Agree: steps at which "
    "the method would have chosen Full's token, for all steps and for the steps of the answer."
)


def table(result: dict[str, Any]) -> str:
    """Format the record as a Markdown table; the method with most mass comes first.

    Args:
        result: the record of `experiments.lab.insight`.
    """
    top = [str(k) for k in result["settings"]["top"]]
    head = ["method", "attended", "mass", "answer", "worst head", *(f"top {k}" for k in top), "own", "agree", "note"]
    body = [
        [
            method_title(m["method"]),
            f"{m['attended_tokens']:.0f}",
            *(f"{m[name]:.1f}" for name in ("value", "in_answer", "worst_head")),
            *(f"{m['top_k'][k]:.1f}" for k in top),
            f"{m['own_k']:.1f}",
            f"{m['agreement']:.0f}, {m['agreement_in_answer']:.0f}",
            m["note"],
        ]
        for m in sorted(result["metrics"], key=lambda m: -m["value"])
    ]
    return "\n".join([*markdown_rows([head, *body]), "", _LEGEND])
