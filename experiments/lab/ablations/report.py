"""Makes the page of the ablations from their records alone: the papers' claims and whether they hold, then every table."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lab.ablations.claims import CLAIMS
from experiments.lab.ablations.settings import NAMES
from experiments.lab.ablations.verdicts import Verdict, judge
from experiments.records import device_kinds, markdown_rows
from experiments.records.report import Column, row_table

_HEAD = """# Ablations

What each part of the papers' methods is worth: one part is changed at a time.

Scores in percent, by each task's own scorer; the question is part of the prompt. n: samples of each cell. Attended:
tokens that enter the softmax of a decode step. Read: bytes of KV and metadata that a decode step reads, over Full's at
the same length. Both are means over the tasks. Intervals, knobs and seconds of every cell are in the JSON records. Rows
of CHESS without a knob `centred` in the record are of its printed form, `Chess(**PRINTED)`."""

_DISTANCE = """KL: divergence of the method's next-token distribution from Full's, in nats per token, along held-out prose
(prose) or along what Full writes (written), through the decode path; less is better. Top: steps at which both find the same
token most likely."""

_CLAIMS = """## What the papers claim

Does it hold in sign and order? Differences are of the same examples, pooled over the rows that differ in nothing else, with
a 95 % paired bootstrap interval: how much better the rows are that the paper prefers, in points of the score (tasks) and in
nats of the distance (KL). Where no example differs, the interval is that of the rule of three. "Not resolved": the interval
does not tell."""


def records_in(folder: pathlib.Path) -> list[pathlib.Path]:
    """List the records of a folder in the order of the page: paper by paper, and last the records that are no longer run."""
    files = sorted(folder.glob("*.json"))
    return sorted(files, key=lambda path: NAMES.index(path.stem) if path.stem in NAMES else len(NAMES))


def ablation_tables(records: Sequence[pathlib.Path], folder: pathlib.Path) -> str:
    """Format the claims and the tables of some records as a page.

    Args:
        records: the files of the records; the record of drift has no tables and only serves the claims.
        folder: folder of the page, from which the records are linked.
    """
    read = {path: json.loads(path.read_text(encoding="utf-8")) for path in records}
    lines = [_HEAD]
    if any(m["unit"] == "nats" for record in read.values() for m in record["metrics"]):
        lines += ["", _DISTANCE]
    rows = claim_rows({path.stem: record["metrics"] for path, record in read.items()})
    if rows:
        head = ("method", "claim", "source", "on tasks", "points", "by KL", "nats")
        lines += ["", _CLAIMS, "", *markdown_rows([head, *rows])]
    for path, record in read.items():
        settings, device = record["settings"], " and ".join(device_kinds(record))
        for table in record.get("notes", {}).get("tables", ()):
            mine = [m for m in record["metrics"] if m["table"] == table["title"] and m["arm"] in table["arms"]]
            if not mine:
                continue
            lines += ["", f"## {table['title']}", "", table["text"], "", *_rows(table["arms"], mine), ""]
            lengths = sorted({m["length"] for m in mine})
            who = list(dict.fromkeys(m.get("model", settings["model"]) for m in mine))
            lines.append(
                f"n = {samples(mine)}; {', '.join(map(str, lengths))} tokens; {' and '.join(who)} model, "
                f"{settings['dtype']}, {device}; [record]({pathlib.Path(os.path.relpath(path, folder)).as_posix()})"
            )
            if left := _left_out(table["arms"], mine):
                lines += ["", f"Left out, because Full does not solve them: {left}."]
    return "\n".join(lines) + "\n"


def claim_rows(metrics: Mapping[str, Sequence[dict[str, Any]]]) -> list[Sequence[str]]:
    """Format a row for each claim that the records can decide.

    Args:
        metrics: the cells of each record, by the record's name.
    """
    rows = []
    for claim in CLAIMS:
        mine = metrics.get(claim.record, ())
        verdicts = [judge(claim, mine, unit) for unit in ("percent", "nats")]
        if any(verdicts):
            judged = (_judged(verdict, digits) for verdict, digits in zip(verdicts, (1, 3), strict=True))
            rows.append((claim.method, claim.text, claim.source, *(cell for pair in judged for cell in pair)))
    return rows


def _judged(verdict: Verdict | None, digits: int) -> tuple[str, str]:
    if verdict is None:
        return "", ""
    differences = (f"{mean:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]" for mean, low, high in verdict.differences)
    return verdict.holds, "; ".join(differences)


def _left_out(arms: Sequence[str], metrics: Sequence[dict[str, Any]]) -> str:
    """Name the tasks that only Full has answered, with its score."""
    others = {m["name"] for m in metrics if m["method"] != "full"}
    alone = [m for m in metrics if m["method"] == "full" and m["name"] not in others] if len(arms) > 1 else []
    return ", ".join(f"{m['name']} ({m['value']:.0f} %)" for m in alone if others)


def _rows(arms: Sequence[str], metrics: Sequence[dict[str, Any]]) -> list[str]:
    """Format a table: the score on each task, their mean, distances, and the tokens and bytes that a step reads."""
    scored = {m["name"] for m in metrics if m["unit"] == "percent" and m["method"] != "full"}
    scored = scored or {m["name"] for m in metrics if m["unit"] == "percent"}
    tasks = [name for name in dict.fromkeys(m["name"] for m in metrics) if name in scored]
    far = list(dict.fromkeys(m["name"] for m in metrics if m["unit"] == "nats"))
    columns: dict[str, Column] = {"": lambda row: row["arm"]}
    for task in tasks:
        columns[task] = lambda row, task=task: f"{row[task]['value']:.1f}" if task in row else None
    if len(tasks) > 1:
        columns["mean"] = lambda row: _mean_score([row[task] for task in tasks if task in row])
    for name in far:
        columns[f"KL {name}"] = lambda row, name=name: f"{row[name]['value']:.3g}" if name in row else None
        columns["top"] = lambda row, name=name: f"{row[name]['same_top_percent']:.1f} %" if name in row else None
    columns |= {
        "attended": lambda row: f"{mean(row['cells'], 'attended_tokens'):.0f}",
        "read": lambda row: f"{100 * _share_read(row['cells']):.0f} %",
        "counters": lambda row: counters(row["cells"]),
    }
    rows = []
    for arm in arms:
        cells = {m["name"]: m for m in metrics if m["arm"] == arm and m["name"] in (*tasks, *far)}
        if cells:
            rows.append({"arm": arm, "cells": list(cells.values()), **cells})
    return row_table(rows, columns)


def _mean_score(metrics: Sequence[dict[str, Any]]) -> str | None:
    return f"{mean(metrics, 'value'):.1f}" if metrics else None


def _share_read(metrics: Sequence[dict[str, Any]]) -> float:
    return mean(metrics, "bytes_read_per_step") / mean(metrics, "full_bytes_read_per_step")


def mean(metrics: Sequence[dict[str, Any]], field: str) -> float:
    """Average a field over cells."""
    return float(np.mean([metric[field] for metric in metrics]))


def counters(metrics: Sequence[dict[str, Any]]) -> str:
    """Average every counter over the cells that have it, as text."""
    names = sorted({name for metric in metrics for name in metric["counters"]})
    means = {name: np.mean([m["counters"][name] for m in metrics if name in m["counters"]]) for name in names}
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in means.items())


def samples(metrics: Sequence[dict[str, Any]]) -> str:
    """Format the number of samples of a cell, or the least and the most."""
    counts = sorted({metric["samples"] for metric in metrics})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
