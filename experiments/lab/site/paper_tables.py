"""The papers' tables that are made again on models of ours, from the records in ``docs``: signs, orders, and every score."""

from __future__ import annotations

import functools
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence

from experiments.evaluation import (
    BASELINE,
    Change,
    Difference,
    Entry,
    Remade,
    System,
    Verdict,
    kendall_tau,
    load,
    remade_tables,
    verdicts,
)
from experiments.lab.site.marks import missing
from experiments.lab.site.runs import wrapped
from experiments.records import markdown_rows, method_title

MAIN = "main"
PAGE = "papers"  # of docs/tables
SETTINGS = tuple(f"papers-{x}" for x in ("chess", "mosaickv", "pariskv", "sentencekv", "tokenselect", "infinitebench"))
_MADE_BY = {
    MAIN: SETTINGS,
    "qwen-16k": ("qwen-16k", "qwen-papers", "qwen-papers-niah"),
    "qwen-32k": ("qwen-32k", "qwen-papers"),
}  # settings by record
_Judged = list[tuple[Remade, list[Verdict]]]
_HEAD = """# Tables of the papers, made again

The comparisons that the five papers print, made again with our methods, and the papers' numbers beside ours. Our model is
SmolLM2-135M, or Qwen2.5-Coder-1.5B where a title says so. Prompts and lengths differ from the papers', and often the tasks
do. So scores are not compared. What is compared is the sign of each system's difference to Full, and the order of the
systems. [Five papers](../five-papers.md) says what it means. The settings are `docs/settings/papers-*.yaml` and
`docs/settings/qwen-papers*.yaml`.

Less Full: the difference to Full on the same tasks. Ours has a 95 % paired bootstrap interval. Papers print none; where the
number of a table's samples is known, it has the interval of answers that do not depend on each other, which is too wide. A
mean is over the tasks that both tables have, where they have the same tasks. "Not run" and "3 of 7 cells" stand where our
rows are missing; such systems are in no comparison. "As in the main table": the papers' methods with their papers' numbers
of tokens, all other methods with an eighth of the context."""
_ABOUT_SUMMARY = (
    "A row for each table and each setting of ours; where the paper prints several models, their values stand one after "
    "the other. Systems: how many systems we have run, of all systems that can be run. Sign: how many systems differ from "
    "Full with the paper's sign, with the opposite sign, or not beyond noise. Tau: Kendall's tau between the paper's order "
    "and ours, 1 for the same and -1 for the reverse; theirs: the tau between the paper's models, over the same systems. "
    "Change places: pairs of systems whose order differs beyond noise, of all pairs."
)


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """Return the function that makes the summary, by its name; see `experiments.lab.site.marks`."""
    there = (docs / "records" / "results" / MAIN).is_dir()
    return {"papers-remade": functools.partial(summary, docs) if there else functools.partial(missing, docs, SETTINGS)}


def page(docs: pathlib.Path) -> str:
    """Write the page of all tables.

    Args:
        docs: folder of the documentation, with the folder ``records`` in it.
    """
    judged = _judged(docs)
    lines = [_HEAD, "## What agrees", _summary(judged, "")]
    for remade, found in judged:
        lines += [f"## {remade.title}", wrapped(remade.about)]
        lines += [_scores(remade, found), *_notes(docs, remade, found)] if found else [_missing(docs, remade)]
    return "\n\n".join(lines) + "\n"


def summary(docs: pathlib.Path) -> str:
    """Write a table with a row for each table and setting: how many signs agree, tau, and how many pairs change places.

    Args:
        docs: folder of the documentation, with the folder ``records`` in it.
    """
    return _summary(_judged(docs), f"tables/{PAGE}.md")


def _summary(judged: _Judged, page: str) -> str:
    rows = []
    for remade, found in judged:
        for setting, labels in remade.settings.items():
            mine = [verdict for verdict in found if verdict.setting == setting]
            rows.append(_summary_row(remade, setting, len(labels), mine, page))
    head = ("table", "ours", "systems", "sign: same", "opposite", "within noise", "tau", "theirs", "change places")
    return wrapped(_ABOUT_SUMMARY) + "\n\n" + "\n".join(markdown_rows([head, *rows]))


def _judged(docs: pathlib.Path) -> _Judged:
    """Judge the tables by their records; a table without a record has no verdicts."""
    records = {name: _entries(docs, name) for name in {remade.record for remade in remade_tables()}}
    return [(remade, verdicts(remade, records[remade.record])) for remade in remade_tables()]


def _missing(docs: pathlib.Path, remade: Remade) -> str:
    """Write the text in place of a table without a record."""
    return missing(docs, _MADE_BY.get(remade.record, (remade.record,)))


def _entries(docs: pathlib.Path, name: str) -> list[Entry]:
    """Load the rows of a result folder, or of an ablation's record; empty if there is neither."""
    folder, file = docs / "records" / "results" / name, docs / "records" / "ablations" / f"{name}.json"
    if folder.is_dir():
        return [entry for entry in load([folder]) if entry.row["unit"] == "percent"]
    metrics = json.loads(file.read_text(encoding="utf-8"))["metrics"] if file.is_file() else []
    made = []
    for row in metrics:  # all arms answer the same samples in the same order
        scores = {str(index): score for index, score in enumerate(row["scores"])}
        told = {**row, "task": row["name"], "method": row["setting"]["method"]}
        made.append(Entry(file, told, scores, {}, dict.fromkeys(scores, "")))
    return made


def _summary_row(remade: Remade, setting: str, systems: int, found: Sequence[Verdict], page: str) -> Sequence[str]:
    """Write the verdicts of one setting, one for each model of the paper; none if there is no record."""
    both = found[0].compared if found else []
    pairs, signs = math.comb(len(both), 2), [[system.sign for system in verdict.systems] for verdict in found]
    theirs = [
        kendall_tau([x.printed for x in one.compared], [x.printed for x in other.compared])
        for one, other in itertools.combinations(found, 2)
    ]
    anchor = re.sub(r"[^a-z0-9 -]", "", remade.title.lower()).replace(" ", "-")
    return (
        f"[{remade.title}]({page}#{anchor})",
        setting,
        f"{len(both)} of {systems}",
        *(_each(one.count(kind) if any(one) else "" for one in signs) for kind in ("same", "opposite", "within noise")),
        _each(_tau(verdict.tau) for verdict in found),
        _each(map(_tau, theirs)),
        _each(sum(change.beyond_noise for change in verdict.changes) for verdict in found) + f" of {pairs}" if pairs else "",
    )


def _each(values: Iterable[object]) -> str:
    """Join the values of several models; "" if none is known."""
    shown = [str(value) for value in values]
    return ", ".join(shown) if any(shown) else ""


def _tau(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _scores(remade: Remade, found: Sequence[Verdict]) -> str:
    """Show the printed scores of each model, then our scores at each setting."""
    parts = {verdict.part.table.model: verdict.part for verdict in found}
    ours = {verdict.setting: verdict for verdict in found}
    head, body = ["system"], [["Full"], *([_title(label)] for label in remade.rows)]
    for model, part in parts.items():
        head += [model, "less Full"]
        for line, label in zip(body, (BASELINE, *remade.rows), strict=True):
            rows, lost = part.table.rows, label != BASELINE and BASELINE in part.table.rows
            line.append(f"{part.value(label):.1f}" if label in rows else "")
            line.append(_points(part.difference(label, BASELINE)) if label in rows and lost else "")
    for setting, verdict in ours.items():
        head += [setting, "less Full"]
        systems = {system.label: system for system in verdict.systems}
        body[0] += [f"{verdict.full:.1f}", ""]
        for line, label in zip(body[1:], remade.rows, strict=True):
            line += _ours(systems.get(label), verdict.cells)
    return "\n".join(markdown_rows([head, *body]))


def _ours(system: System | None, cells: int) -> list[str]:
    if system is None:
        return ["", ""]
    if system.score is None or system.loss is None:
        return [f"{system.done} of {cells} cells" if system.done else "not run", ""]
    return [f"{system.score:.1f}", _points(system.loss)]


def _notes(docs: pathlib.Path, remade: Remade, found: Sequence[Verdict]) -> list[str]:
    """Describe the pairs that change places, the systems without a row of ours, and the sources of the scores."""
    told = []
    for verdict in found:
        if beyond := [change for change in verdict.changes if change.beyond_noise]:
            text = "; ".join(map(_told, beyond))
            told.append(f"* {verdict.part.table.model}, {verdict.setting}: {text}.")
    made = ["In the paper's order, but not in ours (printed difference, then ours):\n\n" + "\n".join(told)] if told else []
    if remade.left_out:
        left = "; ".join(f"{_title(label)} ({why})" for label, why in remade.left_out.items())
        made.append(f"Without a row of ours: {left}.")
    sources = ", ".join(dict.fromkeys(table.source for table in remade.tables))
    folder = (docs / "records" / "results" / remade.record).is_dir()
    path = f"results/{remade.record}/table.md" if folder else f"ablations/{remade.record}.json"
    return [*made, f"Printed: {remade.tables[0].paper}, {sources}. Ours: [{remade.record}](../records/{path})."]


def _told(change: Change) -> str:
    return (
        f"{_title(change.better)} above {_title(change.worse)} ({_points(change.first)}, {_points(change.second)})"
    )


def _points(gap: Difference) -> str:
    return f"{gap.mean:+.1f} ± {gap.plus_minus:.1f}" if gap.plus_minus else f"{gap.mean:+.1f}"


def _title(label: str) -> str:
    method, space, rest = label.partition(" ")
    return method_title(method) + space + rest
