"""The result folders that the pages quote, read once: rows beside Full, means over tasks, models and devices."""

from __future__ import annotations

import collections
import dataclasses
import functools
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.answering import PAPERS
from experiments.cli import read_record
from experiments.evaluation import BASELINE, Compared, Entry, averages, beside_full, load, read_runs
from experiments.evaluation import against as gap
from experiments.records import device_kinds, short_commit
from kvjax import registry

Row = Mapping[str, Any]
_MODELS = {
    "builtin": "the built-in retrieval toy",
    "smollm2": "SmolLM2-135M-Instruct (4-bit weights)",
    "smollm2-retrieval": "SmolLM2-135M-Instruct (4-bit weights) with our retrieval adapter",
    "qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B-Instruct (4-bit weights) as it was published",
    "qwen2.5-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct (4-bit weights) as it was published",
}


class Runs:
    """Some result folders of the same model, as far as they exist.

    Args:
        docs: folder of the documentation, with the folder ``records`` in it.
        names: names of folders of ``docs/records/results``.
        least: the least score of Full, in percent, with which a task counts in means at a length.
        apart: tasks that count in no mean.
    """

    def __init__(
        self, docs: pathlib.Path, names: Sequence[str], least: float = 0.0, apart: Sequence[str] = ()
    ) -> None:
        self.folders = [folder for name in names if (folder := docs / "records" / "results" / name).is_dir()]
        self.least, self.apart = least, apart

    def __bool__(self) -> bool:
        return bool(self.folders)

    @functools.cached_property
    def entries(self) -> list[Entry]:
        """All rows of scores, with their examples."""
        return [_without_scores(entry) for entry in load(self.folders) if entry.row["unit"] == "percent"]

    @functools.cached_property
    def own(self) -> list[Entry]:
        """The rows of kvjax' methods at their own settings, whose names show no knobs but a file of heads' scores."""
        return [entry for entry in self.entries if entry.row["method"] in registry.builtin()]

    @functools.cached_property
    def compared(self) -> list[Compared]:
        """Every row of `own` beside Full's."""
        return beside_full(self.own)

    @functools.cached_property
    def means(self) -> list[dict[str, Any]]:
        """Means of `compared` over the tasks that count."""
        return averages(self.counting(self.compared))

    @functools.cached_property
    def counted(self) -> dict[int, list[str]]:
        """The tasks that count in means, by length: Full scores at least `least` with the question in the prompt."""
        made: dict[int, list[str]] = {}
        for row in (entry.row for entry in self.own if entry.row["method"] == BASELINE):
            names = made.setdefault(row["length"], [])
            asked = row["question"] == "prefill" or row["length"] not in self._in_prompt
            if asked and row["value"] >= self.least and row["name"] not in (*self.apart, *names):
                names.append(row["name"])
        return made

    @functools.cached_property
    def _in_prompt(self) -> set[int]:
        """The lengths at which Full was asked with the question in the prompt."""
        return {x.row["length"] for x in self.own if (x.row["method"], x.row["question"]) == (BASELINE, "prefill")}

    def counting(self, compared: Sequence[Compared]) -> list[Compared]:
        """Select the rows of the tasks that count."""
        return [item for item in compared if item.row["name"] in self.counted.get(item.row["length"], ())]

    def mean(self, method: str, question: str, length: int) -> dict[str, Any] | None:
        """Find the mean of a method, or None if it was not measured on all tasks."""
        at = (method, question, length)
        return next((x for x in self.means if (x["method"], x["question"], x["length"]) == at), None)

    def lengths(self, question: str) -> list[int]:
        """List the lengths at which the question was asked in this way, ascending."""
        return sorted({x["length"] for x in self.means if x["question"] == question})

    def shown(self, question: str) -> list[int]:
        """List the lengths that tables show: the shortest, and longer lengths that few of the papers' methods lack.

        A paper's method is missing at a length if it has a mean at the shortest length, but none at this one. A length is
        shown if fewer than half of them are missing; their cells stay empty.
        """
        lengths = self.lengths(question)
        wanted = [method for method in PAPERS if lengths and self.mean(method, question, lengths[0])]
        there = {x: sum(self.mean(method, question, x) is not None for method in wanted) for x in lengths[1:]}
        return lengths[:1] + [x for x, count in there.items() if 2 * count > len(wanted)]

    def ranked(self, question: str, length: int) -> list[str]:
        """Rank the methods: Full, then the other methods by their mean scores at a length, the best first."""
        here = [x for x in self.means if (x["question"], x["length"]) == (question, length)]
        return [x["method"] for x in sorted(here, key=lambda x: (x["method"] != "full", -x["score"]))]

    @property
    def subject(self) -> str:
        """The model, its dtype and the devices, as the beginning of a sentence."""
        return self._on(device_kinds(read_record(self.folders[0])))

    def measured(self, entries: Sequence[Entry]) -> tuple[str, str]:
        """Return `subject` with the devices of some rows alone, and a sentence with their commits."""
        runs = [self._runs[entry.folder][entry.row["run"]] for entry in entries]
        commits = collections.Counter(short_commit(run["commit"]) for run in runs)
        if len(commits) == 1:
            told = f"All {len(runs)} scores were measured on commit {next(iter(commits))}."
        else:
            each = (f"{count} on {commit}" for commit, count in commits.most_common())
            told = f"Of {len(runs)} scores were measured {', '.join(each)}."
        return self._on(sorted({run["device"]["kind"] for run in runs})), told

    def _on(self, devices: Sequence[str]) -> str:
        settings = read_record(self.folders[0])["settings"]
        model = _MODELS.get(settings["model"], f"`{settings['model']}`")
        return f"{model[0].upper()}{model[1:]}, computed in {settings['dtype']}, {' and '.join(devices)}"

    @functools.cached_property
    def _runs(self) -> dict[pathlib.Path, list[dict[str, Any]]]:
        return {folder: read_runs(folder) for folder in self.folders}

    @property
    def about(self) -> str:
        """`subject`, JAX and the commits, as a sentence without its full stop."""
        runs = [run for folder in self.folders for run in read_runs(folder) or [read_record(folder)]]
        commits = dict.fromkeys(short_commit(run["commit"]) for run in runs)
        return f"{self.subject}, JAX {runs[0]['versions']['jax']}, commit{'s' * (len(commits) > 1)} {', '.join(commits)}"


def _without_scores(entry: Entry) -> Entry:
    """Name a method without its file of heads' scores, which is no choice: HeadKV and DuoAttention do not run without one."""
    named = re.sub(r"\(scores=[^,()]*\)$", "", entry.row["method"])
    return dataclasses.replace(entry, row={**entry.row, "method": named})


def megabytes(count: float) -> str:
    """Format bytes as megabytes."""
    return f"{count / 1e6:.2f} MB"


def read(mean: Row) -> str:
    """Format the bytes that a decode step reads, and their share of the bytes that it reads under Full."""
    if mean["method"] == "full":
        return megabytes(mean["bytes_read_per_step"])
    return f"{megabytes(mean['bytes_read_per_step'])} ({share(mean)})"


def share(row: Row) -> str:
    """Format the bytes that a decode step reads as a share of the bytes that it reads under Full."""
    return f"{100 * row['bytes_read_per_step'] / row['full_bytes_read_per_step']:.1f} %"


def against(mean: Row | None) -> str:
    """Format the difference to Full with its interval; "" for Full itself or without a mean."""
    return "" if mean is None or mean["method"] == "full" else gap(mean)


def wrapped(text: str) -> str:
    """Wrap a paragraph in lines of at most 120 letters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)
