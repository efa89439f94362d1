"""Formats tables of compared methods, with the commits, devices and settings that made the numbers."""

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.answering import budget_of, without_effect
from experiments.cli import naming, read_record
from experiments.evaluation.comparison import (
    BASELINE,
    FEW,
    Compared,
    averages,
    beside_reference,
    flat_rows,
    load,
    oracle_shares,
    reference_of,
)
from experiments.evaluation.reachable import LEGEND, ORACLE, family, percent
from experiments.records import csv_table, device_kinds, markdown_rows, method_title, short_commit

_OF_CELLS = f"; bold: beyond noise. Fewer than {FEW} examples that are all alike have no interval"  # not of means
_LEGEND = (
    "Scores are 0 to 100. Against {reference}: mean difference "
    f"on the same examples with a 95 % paired bootstrap interval{_OF_CELLS}. n: contexts, or examples that share none; of "
    "means, in the task that has fewest. Same answer: word for word. Question: "
    "in the prompt that the method compresses (prefill), after it (extend), or one after the other in one cache (turns). "
    "Budget: tokens per KV head that the setting asks for; where it asks for none, the tokens attended. "
    "Read, and tokens attended: in the step after an answer's eighth token, or its last if it is shorter (in runs before "
    "2026-11-29 always its last), bytes of keys, values and metadata; resident: allocated per row."
)
LONG_ANSWER = 512  # tokens; tables with a longer mean answer have a column of the answers' lengths
_ACCEPTED = " Accepted: tokens that a pass of Full gave over tokens drafted by the method (`kvjax.Verified`)."


def report(folders: Sequence[pathlib.Path], reference: str = BASELINE) -> str:
    """Format the tables of some folders, beside Full or the method ``reference``, as one Markdown text.

    Raises:
        ValueError: a folder does not record what made its numbers, or an error of `experiments.evaluation.comparison`.
    """
    with naming(*folders):
        compared = _compared(folders, reference)
        title = method_title(compared[0].reference)
        about = f"How well each method answers, beside {title} on the same examples."
        legend = _LEGEND.replace("{reference}", title) + _ACCEPTED * any(_accepted(item.row) for item in compared)
        legend += f" {LEGEND}" * any(family(item.row["method"]) == ORACLE for item in compared)
        title = f"# Evaluation: {' and '.join(folder.resolve().name for folder in folders)}"
        parts = [title, about, "\n".join(_about(folder) for folder in folders), legend]
        parts += ["## Means over tasks", summary_table(compared), *remarks(compared)]
        return "\n\n".join([*parts, "## Every cell", cell_table(compared)]) + "\n"


def csv_report(folders: Sequence[pathlib.Path], reference: str = BASELINE) -> str:
    """Format every cell of some folders as comma-separated values, a line for each; see `flat_rows`."""
    with naming(*folders):
        return csv_table(flat_rows(_compared(folders, reference)))


def _compared(folders: Sequence[pathlib.Path], reference: str) -> list[Compared]:
    entries = load(folders)
    return beside_reference(entries, reference if reference == BASELINE else reference_of(entries, reference))


def summary_table(compared: Sequence[Compared]) -> str:
    """Format `summary_cells` as Markdown."""
    return "\n".join(markdown_rows(summary_cells(compared)))


_AGAINST = "against "  # a column, whose heading ends with the reference
_OF_ORACLE = "of the oracle"  # a column, which tables without any oracle leave out


def _headings(columns: Iterable[str], compared: Sequence[Compared]) -> list[str]:
    title = method_title(compared[0].reference) if compared else ""
    return [name.replace(_AGAINST, f"{_AGAINST}{title}") for name in columns]


_MEANS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "method": lambda mean: _method(mean),
    "budget": lambda mean: f"{mean['budget']:,}",
    "question": lambda mean: mean["question"],
    "length": lambda mean: _length(mean),
    "score": lambda mean: f"{mean['score']:.1f}",
    "n": lambda mean: f"{mean['samples']:,}",
    _AGAINST: lambda mean: "" if mean["method"] == mean["reference"] else against(mean),
    _OF_ORACLE: lambda mean: percent(mean["of_oracle"]),
    "same answer": lambda mean: f"{mean['same']:.0f} %",
    "tokens attended": lambda mean: f"{mean['attended_tokens']:,} of {mean['length_tokens']:,}",
    "read": lambda mean: f"{_bytes(mean['bytes_read_per_step'])} ({_share(mean):.1f} %)",
    "resident": lambda mean: _bytes(mean["resident_bytes_per_row"]),
}


def summary_cells(compared: Sequence[Compared]) -> list[list[str]]:
    """Make a row for each method and length: means over the tasks, for methods that ran all of the reference's tasks."""
    means, columns = averages(compared), dict(_MEANS)
    if not any(mean["of_oracle"] for mean in means):
        del columns[_OF_ORACLE]
    return [_headings(columns, compared), *([column(mean) for column in columns.values()] for mean in means)]


def remarks(compared: Sequence[Compared]) -> list[str]:
    """Say in a sentence each what a reader of the tables should know.

    Where Full scores 0, so that nothing is compared; which methods `summary_table` leaves out; and how many answers of each
    method reached their limit of tokens and scored below 100, so that they may have been cut before they were right.
    """
    told = []
    if tasks := dict.fromkeys(
        _task(item.row) for item in compared if item.row["method"] == BASELINE and not item.row["value"]
    ):
        told.append(f"Full scores 0 in {', '.join(tasks)}: there nothing is compared, because the model cannot do the task.")
    kept = {(mean["method"], mean["question"], mean["length"]) for mean in averages(compared)}
    keys = dict.fromkeys((item.row["method"], item.row["question"], item.row.get("length")) for item in compared)
    if left := [key for key in keys if key not in kept]:
        names = (f"{method_title(method)} ({question}, {_length({'length': length})})" for method, question, length in left)
        title = method_title(compared[0].reference)
        told.append(f"No mean, because they lack cells that {title} has or have others: {', '.join(names)}.")
    cut: dict[str, list[int]] = {}
    for row in (item.row for item in compared if "cut_below_100" in item.row):
        mine = cut.setdefault(_method(row), [0, 0])
        mine[0], mine[1] = mine[0] + row["cut_below_100"], mine[1] + row["examples"]
    if parts := [f"{method} {count} of {asked}" for method, (count, asked) in cut.items() if count]:
        hint = "a larger --max-new-tokens might score more"
        told.append(f"Answers that reached their limit of tokens and scored below 100 ({hint}): {', '.join(parts)}.")
    return told + edited([item.row for item in compared])


def edited(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the methods whose rows two versions of their class answered, in a list of one sentence; [] if there are none."""
    versions: dict[str, set[str]] = {}
    for row in rows:
        versions.setdefault(_method(row), set()).add((row.get("knobs") or {}).get("source", ""))
    mixed = [method for method, sources in versions.items() if len(sources) > 1]
    return [f"Answered by versions of an edited class, so run all tasks again: {', '.join(mixed)}."] * bool(mixed)


def _method(row: Mapping[str, Any]) -> str:
    return method_title(row["method"]) + (" (no effect)" if without_effect(row) else "")


_CELLS: dict[str, Callable[[Compared], str]] = {
    "task": lambda item: _task(item.row),
    "length": lambda item: _length(item.row),
    "method": lambda item: _method(item.row),
    "budget": lambda item: f"{budget_of(item.row):,}",
    "question": lambda item: item.row["question"],
    "score [95 %]": lambda item: f"{item.row['value']:.1f} {_interval(item.row['interval_95'], item.contexts, '.1f')}",
    "n": lambda item: f"{item.contexts:,}",
    f"{_AGAINST} [95 %]": lambda item: "" if item.is_reference else _change(item),
    "same answer": lambda item: f"{item.same:.0f} %",
    "answer tokens": lambda item: _trace(item.row),
    "accepted": lambda item: _accepted(item.row),
    "tokens attended": lambda item: f"{item.row['attended_tokens']:,.0f}",
    "read": lambda item: _bytes(item.row["bytes_read_per_step"]),
    "resident": lambda item: _bytes(item.row["resident_bytes_per_row"]),
}


def cell_table(compared: Sequence[Compared]) -> str:
    """Format a row for each cell and method, with intervals; differences beyond noise are bold."""
    columns = dict(_CELLS)
    found = oracle_shares(compared)
    if any(found):
        of_oracle = {id(item): percent(share) for item, share in zip(compared, found, strict=True)}
        columns[_OF_ORACLE] = lambda item: of_oracle[id(item)]
    if not any(item.row.get("mean_answer_tokens", 0) > LONG_ANSWER for item in compared):
        del columns["answer tokens"]
    if not any(_accepted(item.row) for item in compared):
        del columns["accepted"]
    return "\n".join(
        markdown_rows([_headings(columns, compared), *([column(item) for column in columns.values()] for item in compared)])
    )


def _task(row: Mapping[str, Any]) -> str:
    return row["name"] + ("" if row.get("depth") is None else f", depth {row['depth']:.0%}")


def _trace(row: Mapping[str, Any]) -> str:
    """Format the mean length of the answers in tokens, and how many of them reached their limit; "" if it is not known."""
    if "mean_answer_tokens" not in row:
        return ""
    unfinished = f" ({row['unfinished']} unfinished)" if row.get("unfinished") else ""
    return f"{row['mean_answer_tokens']:,.0f}{unfinished}"


def _accepted(row: Mapping[str, Any]) -> str:
    """Format the tokens that a pass of `kvjax.Verified` gave; "" for other methods."""
    counters = row.get("counters")
    per_pass = counters.get("tokens_per_pass") if isinstance(counters, Mapping) else None  # a file may hold anything
    return f"{per_pass:.2f} a pass" if isinstance(per_pass, (int, float)) else ""


def _change(item: Compared) -> str:
    interval = _interval(item.interval_95, item.contexts, "+.1f")
    text = f"{item.difference:+.1f} {interval}"
    return f"**{text}**" if item.beyond_noise else text


def against(mean: Mapping[str, Any]) -> str:
    """Format the mean difference to the reference with its interval; none if a few examples of each task were all alike."""
    alike = not mean["plus_minus"] and mean["samples"] < FEW
    return f"{mean['difference']:+.1f}" + ("" if alike else f" ± {mean['plus_minus']:.1f}")


def _interval(ends: Sequence[float], contexts: int, style: str) -> str:
    """Format an interval in brackets, or say that there is none."""
    low, high = ends
    if low == high and contexts < FEW:
        return f"(all {contexts} alike)" if contexts > 1 else "(one context)"
    return f"[{low:{style}}, {high:{style}}]"


def _share(mean: Mapping[str, Any]) -> float:
    return 100 * mean["bytes_read_per_step"] / mean["full_bytes_read_per_step"]


def _length(row: Mapping[str, Any]) -> str:
    return "as given" if row.get("length") is None else f"{row['length']:,}"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB"


def _about(folder: pathlib.Path) -> str:
    record = read_record(folder)
    settings = record["settings"]
    facts = (
        f"model {settings['model']}, {settings['dtype']}",
        f"{' and '.join(device_kinds(record))}, JAX {record['versions']['jax']}",
        _origin(record["notes"].get("runs") or [record]),
        f"template {settings.get('template') or 'none'}, truncation {settings.get('truncation')}, "
        f"{settings.get('decoding')} decoding",
    )
    return f"* `{folder.name}`: " + "; ".join(facts)


def _origin(runs: Sequence[Mapping[str, Any]]) -> str:
    """Name the commits that made cells, and their first and last day."""
    days = sorted(run["date"][:10] for run in runs)
    commits = ", ".join(dict.fromkeys(short_commit(run["commit"]) for run in runs))
    return f"commit {commits}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"
