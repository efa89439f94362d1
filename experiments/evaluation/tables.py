"""Tables of compared methods, in Markdown, with where the numbers come from."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.evaluation.comparison import BASELINE, Compared, averages, compare, load
from experiments.evaluation.folder import read_rows, read_runs
from experiments.records import markdown_rows, short_commit

_LEGEND = (
    "Scores are 0 to 100 (perplexity: per token, lower is better; against Full in percent). Against Full: mean difference "
    "on the same examples with a 95 % paired bootstrap interval; bold: beyond noise. Same answer: word for word. Question: "
    "in the prompt that the method compresses (prefill), after it (extend), or one after the other in one cache (turns). "
    "Read: bytes of keys, values and metadata per decode step; resident: allocated per row."
)


def report(folders: Sequence[pathlib.Path]) -> str:
    """The tables of some folders as one Markdown text.

    Raises:
        ValueError: see `experiments.evaluation.comparison`.
    """
    found = compare(load(folders))
    parts = ["# Evaluation", "\n".join(_about(folder) for folder in folders), _LEGEND]
    if any(one.row["unit"] == "percent" for one in found):
        parts += ["## Means over tasks", summary_table(found)]
        if without := _not_averaged(found):
            parts.append(f"No mean, because they lack cells that Full has or have others: {', '.join(without)}.")
    return "\n\n".join([*parts, "## Every cell", cell_table(found)]) + "\n"


def summary_table(found: Sequence[Compared]) -> str:
    """One row per method and length: means over the tasks, for methods that ran all of Full's."""
    rows = []
    for one in averages(found):
        full = one["method"] == BASELINE
        rows.append(
            (
                one["method"] + (" (no effect)" if one["no_effect"] and not full else ""),
                one["question"],
                _length(one),
                f"{one['score']:.1f}",
                "" if full else f"{one['difference']:+.1f} ± {one['plus_minus']:.1f}",
                f"{one['same']:.0f} %",
                f"{one['attended_tokens']:,} of {one['length_tokens']:,}",
                f"{_bytes(one['bytes_read_per_step'])} ({_share(one):.1f} %)",
                _bytes(one["resident_bytes_per_row"]),
            )
        )
    head = (
        "method",
        "question",
        "length",
        "score",
        "against Full",
        "same answer",
        "tokens attended",
        "read",
        "resident",
    )
    return "\n".join(markdown_rows([head, *rows]))


def _not_averaged(found: Sequence[Compared]) -> list[str]:
    kept = {(one["method"], one["question"], one["length"]) for one in averages(found)}
    keys = ((r["method"], r["question"], r.get("length")) for r in (one.row for one in found) if r["unit"] == "percent")
    left = (key for key in dict.fromkeys(keys) if key not in kept)
    return [f"{method} ({place}, {_length({'length': length})})" for method, place, length in left]


def cell_table(found: Sequence[Compared]) -> str:
    """One row per cell and method, with intervals; differences beyond noise are bold."""
    rows = []
    for one in found:
        row = one.row
        full = row["method"] == BASELINE
        low, high = row["interval_95"]
        rows.append(
            (
                row["name"] + ("" if row.get("depth") is None else f", depth {row['depth']:.0%}"),
                _length(row),
                row["method"] + (" (no effect)" if row["no_effect"] and not full else ""),
                row["question"],
                f"{row['value']:.1f} [{low:.1f}, {high:.1f}]",
                "" if full else _change(one),
                "" if one.same is None else f"{one.same:.0f} %",
                f"{row['attended_tokens']:,.0f}",
                _bytes(row["bytes_read_per_step"]),
                _bytes(row["resident_bytes_per_row"]),
            )
        )
    head = (
        "task", "length", "method", "question", "score [95 %]", "against Full [95 %]", "same answer", "tokens attended",
        "read", "resident",
    )  # fmt: skip
    return "\n".join(markdown_rows([head, *rows]))


def _change(one: Compared) -> str:
    low, high = one.interval_95
    text = f"{one.difference:+.1f}{' %' if one.same is None else ''} [{low:+.1f}, {high:+.1f}]"
    return f"**{text}**" if one.beyond_noise else text


def _share(one: Mapping[str, Any]) -> float:
    return 100 * one["bytes_read_per_step"] / one["full_bytes_read_per_step"]


def _length(row: Mapping[str, Any]) -> str:
    return "as given" if row.get("length") is None else f"{row['length']:,}"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def _about(folder: pathlib.Path) -> str:
    found = read_rows(folder)
    told = found["settings"]
    facts = (
        f"model {told['model']}, {told['dtype']}",
        f"{found['device']['kind']}, JAX {found['versions']['jax']}",
        *_origins(read_runs(folder) or [found]),
        f"template {told.get('template') or 'none'}, truncation {told.get('truncation')}, {told.get('decoding')} decoding",
    )
    return f"* `{folder.name}`: " + "; ".join(facts)


def _origins(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Commit, days and cells, a text per commit."""
    made: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        made.setdefault(short_commit(run["commit"]), []).append(run)
    texts = []
    for commit, mine in made.items():
        days = " to ".join(dict.fromkeys((min(run["date"] for run in mine)[:10], max(run["date"] for run in mine)[:10])))
        cells = sum(run.get("cells", 0) for run in mine)
        texts.append(f"commit {commit}, {days}" + (f", {cells} cells in {len(mine)} runs" if len(runs) > 1 else ""))
    return texts
