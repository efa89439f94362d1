"""The documentation site's list of the records of measurements: their settings, devices, commits and dates."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from experiments.evaluation import read_runs
from experiments.records import device_kinds, markdown_rows, short_commit

_PATTERNS = (
    "records/*.json", "records/ablations/*.json", "records/results/*/*.json", "records/fidelity/*/*.json",
)  # fmt: skip
_PAGES = ("*.md", "tables/*.md", "records/results/*/*.md", "records/fidelity/*/*.md")
_OPEN_ENDED = 60  # characters of a setting's value that are shown


def page(docs: pathlib.Path) -> str:
    """Write the list as MyST markdown: a table of all records, their settings, and the pages that ``index.md`` does not name.

    Args:
        docs: folder of the documentation, with the folder ``records`` in it.
    """
    contents = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in record_files(docs)]
    records = [(path, record) for path, record in contents if isinstance(record, dict) and "commit" in record]
    head = ("record", "experiment", "date", "commit", "device", "JAX", "values")
    body = [
        (
            f"[{_label(path, docs)}]({path.relative_to(docs).as_posix()})",
            record.get("experiment", ""),
            _days(path, record),
            _commits(path, record),
            _device(record),
            (record.get("versions") or {}).get("jax", ""),
            len(record.get("metrics") or record.get("rows") or ()),
        )
        for path, record in records
    ]
    lines = [
        "# Records",
        "",
        "Every generated table and plot of this site comes from one of these files; [how to repeat them](reproduce.md). A "
        "record holds its settings, versions, device, commit and date. `+changes` means that files differed from the commit; "
        "several commits mean that cells were measured in several runs, all of which are noted in the record.",
        "",
        *markdown_rows([head, *body]),
        "",
        "## Settings",
        "",
    ]
    for path, record in records:
        lines.append(f"* {_label(path, docs)}: {_settings(record.get('settings') or {})}")
    if others := other_pages(docs):
        lines += ["", "## Other pages", "", "```{toctree}", ":maxdepth: 1", "", *others, "```"]
    return "\n".join(lines) + "\n"


def other_pages(docs: pathlib.Path) -> list[str]:
    """List the pages of ``docs``, its tables and result folders that ``index.md`` does not name, so that none is left out."""
    index = docs / "index.md"
    named = {line.strip() for line in index.read_text(encoding="utf-8").splitlines()} if index.exists() else set()
    paths = [path for pattern in _PAGES for path in sorted(docs.glob(pattern))]
    return [name for path in paths if (name := _label(path, docs)) not in named | {"index", "records"}]


def record_files(docs: pathlib.Path) -> list[pathlib.Path]:
    """List every JSON file that can be a record; the files of the folder ``records`` itself come first."""
    return [path for pattern in _PATTERNS for path in sorted(docs.glob(pattern))]


def _label(path: pathlib.Path, docs: pathlib.Path) -> str:
    return path.relative_to(docs).with_suffix("").as_posix()


def _runs(path: pathlib.Path, record: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """List the date and commit of every run, oldest first, as noted in the record or beside it; else the record's own."""
    noted = (record.get("notes") or {}).get("runs") or {}
    told = [(date, about.get("commit")) for date, about in noted.items()]
    told = told or [(run["date"], run.get("commit")) for run in read_runs(path.parent)]
    return sorted(told, key=lambda run: run[0]) or [(record.get("date") or "", record["commit"])]


def _days(path: pathlib.Path, record: Mapping[str, Any]) -> str:
    first, *_, last = [date[:10] for date, _ in _runs(path, record)] * 2
    return first if first == last else f"{first} to {last}"


def _commits(path: pathlib.Path, record: Mapping[str, Any]) -> str:
    each = [short_commit(commit) for _, commit in _runs(path, record)]
    return ", ".join(dict.fromkeys(each))


def _device(record: Mapping[str, Any]) -> str:
    device = record.get("device") or {}
    if isinstance(device, str):
        return device
    count, kinds = device.get("count", 1), " and ".join(device_kinds(record))
    return (f"{count} x " if count != 1 else "") + kinds


def _settings(settings: Mapping[str, Any]) -> str:
    texts = (f"{name} `{_value(value)}`" for name, value in settings.items())
    return ", ".join(texts) or "none"


def _value(value: Any) -> str:
    text = ", ".join(str(part) for part in value) if isinstance(value, list) else str(value)
    return text if len(text) <= _OPEN_ENDED else f"{text[:_OPEN_ENDED]}..."
