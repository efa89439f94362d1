"""Tables of records for the site: each kind of record has the table of its command.

Records of finished studies, of which no command is left, are listed without tables.
"""

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cli import read_record
from experiments.evaluation import against, averages, beside_reference, by_kind, load, report
from experiments.evaluation.reachable import percent
from experiments.lab.fidelity import fidelity_tables
from experiments.lab.insight.report import table as insight_table
from experiments.lab.site import scores
from experiments.records import device_kinds, markdown_rows, method_title, short_commit
from experiments.speed import kernel_table, offload_tables, speed_tables
from experiments.tasks import GROUPS
from kvjax import registry

COUNTED = 60.0  # percent
_WITH_NOTES = {
    "speed": speed_tables, "offload": offload_tables, "kernels": kernel_table
}  # fmt: skip
_PATTERNS = ("*.json", "exact/*.json", "results/*/metrics.json", "fidelity/*/metrics.json", "ablations/*.json")


def tables(path: pathlib.Path) -> str:
    """Make the Markdown tables of a record or of a result folder; "" for a kind of record that has none.

    Raises:
        ValueError: the path holds no record.
    """
    record = read_record(path)
    kind = record["experiment"].partition(" ")[0]  # "ablation votes" is an ablation
    if kind == "eval":
        return report([path])
    if kind == "fidelity":
        return fidelity_tables(record)
    if kind == "insight":
        return insight_table(record)
    return _WITH_NOTES[kind](record["metrics"], record["notes"]) if kind in _WITH_NOTES else ""


def rows(path: pathlib.Path) -> list[dict[str, Any]]:
    """List the rows of a record: its metrics, and of a folder of `eval` the means over tasks that count, the best first.

    A task counts if Full scores at least 60 percent on it and it is none of code, which models know by heart.
    """
    record = read_record(path)
    if record["experiment"] != "eval":
        return record["metrics"]
    entries = [entry for entry in load([path]) if entry.row["unit"] == "percent"]
    full = {(x.row["name"], x.row["length"]) for x in entries if x.row["method"] == "full" and x.row["value"] >= COUNTED}
    counted = [x for x in entries if (x.row["name"], x.row["length"]) in full and x.row["name"] not in GROUPS["code"]]
    kinds = by_kind([entry.row for entry in counted])
    return [
        {
            **mean,
            **{kind: f"{score:.1f}" for kind, score in kinds[mean["method"], mean["question"], mean["length"]].items()},
            "setting": re.sub(r"answer=\[.*?\]", "answer=[...]", re.sub(r"=[^ ,=]*/([^ ,/]*)\.json", r"=\1", mean["method"])),
            "method": method_title(mean["method"]),
            "score": f"{mean['score']:.1f}",
            "against Full": "" if mean["method"] == "full" else against(mean),
            "of the oracle": percent(mean["of_oracle"]),
            "same answer": f"{mean['same']:.0f} %",
            "read": f"{mean['bytes_read_per_step'] / 1e6:.2f} MB ({_share(mean)})",
            "resident": f"{mean['resident_bytes_per_row'] / 1e6:.2f} MB",
        }
        for mean in sorted(averages(beside_reference(counted)), key=lambda mean: (mean["method"] != "full", -mean["score"]))
    ]


def columns(path: pathlib.Path, names: Sequence[str], where: Mapping[str, str]) -> str:
    """Make a table of some fields of a record's rows.

    Args:
        path: a record or a result folder.
        names: the fields; a row without one has an empty cell.
        where: the values of fields, as text, that select rows; "setting" may be "own", which selects methods without knobs.

    Raises:
        ValueError: no row has these values.
    """
    own = where.get("setting") == "own"
    wanted = {name: value for name, value in where.items() if not (own and name == "setting")}
    selected = [row for row in rows(path) if all(_cell(row.get(name)) == value for name, value in wanted.items())]
    selected = [row for row in selected if not own or row["setting"].partition("(scores=")[0] in registry.builtin()]
    if not selected:
        raise ValueError(f"{path} has no row with {where}")
    return "\n".join(markdown_rows([tuple(names), *(tuple(_cell(row.get(name)) for name in names) for row in selected)]))


def pages(docs: pathlib.Path) -> dict[str, str]:
    """Write a page of tables for each record that has some, and the list of all records; by the name of the file.

    Args:
        docs: folder of the documentation, with the folder ``records`` in it.
    """
    folder, listed, written = docs / "records", [], {"scores.md": scores.page(docs)}
    for file in (file for pattern in _PATTERNS for file in sorted(folder.glob(pattern))):
        record = json.loads(file.read_text(encoding="utf-8"))
        if "commit" not in record:
            continue  # scores of heads, which are an input of methods
        path = file.parent if file.name == "metrics.json" else file
        name = "-".join((*path.relative_to(folder).parent.parts, path.name.removesuffix(".json")))
        link = f"../records/{file.relative_to(folder).as_posix()}"
        text = tables(path)
        if text:
            body = text.partition("\n")[2] if text.startswith("# ") else text
            written[f"{name}.md"] = f"# Record {name}\n\n[The record]({link}).\n\n{body}\n"
        title = f"[{name}]({name}.md)" if text else name
        listed.append((title, record["experiment"], *_origin(record), f"[file]({link})"))
    head = ("record", "experiment", "dates", "commits", "devices", "JAX", "")
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *(name.removesuffix(".md") for name in written), "```"])
    intro = (
        "Every measured number of these pages comes from one of these files, which hold settings, versions, devices, commits "
        "and dates; [how to repeat them](../reproduce.md). [Every score](scores.md) is in one table."
    )
    return {**written, "index.md": "\n".join(["# Records", "", intro, "", *markdown_rows([head, *listed]), "", toctree, ""])}


def _origin(record: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Tell the first and the last day, the commits, the devices and the version of JAX."""
    notes = (record.get("notes") or {}).get("runs") or {}  # by date, or a list with dates
    dated = notes.items() if isinstance(notes, dict) else ((run["date"], run) for run in notes)
    runs = [(date, about.get("commit")) for date, about in dated]
    runs = sorted(runs, key=lambda run: run[0]) or [(record["date"], record["commit"])]
    days = dict.fromkeys(date[:10] for date in (runs[0][0], runs[-1][0]))
    commits = dict.fromkeys(short_commit(commit) for _, commit in runs)
    return " to ".join(days), ", ".join(commits), " and ".join(device_kinds(record)), record["versions"].get("jax", "")


def _share(mean: Mapping[str, Any]) -> str:
    return f"{100 * mean['bytes_read_per_step'] / mean['full_bytes_read_per_step']:.1f} %"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
