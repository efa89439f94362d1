"""The scores that the papers print, beside those of a result folder: which cells are the same, and which are not."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.answering import budget_tokens
from experiments.cli import parse_yaml
from experiments.evaluation.comparison import BASELINE, Compared
from experiments.records import markdown_rows
from experiments.tasks import expand

_FILE = "printed.yaml"
_ABOUT = (
    "Scores that papers print for the same model and task, beside ours. Comparable: same model, length and knobs; \"open\": "
    "as far as the paper prints its setting. Loss: against Full on the same cell. Samples, prompts and scorers are never "
    "quite the same, so the loss says more than the score."
)


@dataclasses.dataclass(frozen=True)
class Printed:
    """A number that a paper prints.

    Attributes:
        paper: the paper's method.
        source: table or section.
        model: the model as the paper names it.
        models: names of checkpoints that are this model, or may be.
        length: tokens of prompt and answer.
        method: the method's registered name.
        knobs: what the paper says of its setting.
        open: what the paper does not say; "" if nothing is missing.
        tasks: one task, or those that the printed mean is over.
        value: in percent.
        full: the same of Full.
    """

    paper: str
    source: str
    model: str
    models: tuple[str, ...]
    length: int
    method: str
    knobs: Mapping[str, Any]
    open: str
    tasks: tuple[str, ...]
    value: float
    full: float


@functools.cache
def printed() -> tuple[Printed, ...]:
    """All numbers of the file that ships."""
    text = importlib.resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return tuple(number for entry in parse_yaml(text) for number in _numbers(entry))


def _numbers(entry: Mapping[str, Any]) -> list[Printed]:
    """The numbers of a table: of every method, its scores and its means."""
    tasks, made = expand(tuple(entry["tasks"])), []
    base = entry["rows"][BASELINE]
    for method, row in entry["rows"].items():
        common = {
            "paper": entry["paper"],
            "source": entry["source"],
            "model": entry["model"],
            "models": tuple(entry["models"]),
            "method": method,
            "knobs": row.get("knobs", {}),
            "open": "; ".join(filter(None, (entry.get("open"), row.get("open")))),
        }
        cells = [((task,), entry["length"], "scores", index) for index, task in enumerate(tasks) if "scores" in row]
        values = [(names, length, row[kind][index], base[kind][index]) for names, length, kind, index in cells]
        if "mean" in row:
            values.append((tasks, entry["length"], row["mean"], base["mean"]))
        for index, length in enumerate(entry.get("lengths", ())):
            values.append((tasks, length, row["means"][index], base["means"][index]))
        made += [
            Printed(**common, tasks=names, length=length, value=float(value), full=float(full))
            for names, length, value, full in values
        ]
    return made


def beside(compared: Sequence[Compared], model: str) -> str:
    """Our cells beside the printed ones, as Markdown; of other models nothing is shown.

    Args:
        compared: see `experiments.evaluation.comparison.compare`.
        model: name of our model, with or without the owner of its repository.
    """
    checkpoint = model.rpartition("/")[2].lower()  # a repository's name has its owner in front
    known = [number for number in printed() if checkpoint in (name.lower() for name in number.models)]
    if not known:
        names = dict.fromkeys(f"{number.model} ({number.paper})" for number in printed())
        return f"The papers print no score on RULER for {model}. They print scores for {', '.join(names)}."
    rows = [row for number in known for row in _rows(number, compared)]
    if not rows:
        return f"None of these cells has a task and a method for which a paper prints a score of {model}."
    head = ("method", "task", "length", "ours", "loss", "printed", "loss", "at", "comparable", "source")
    return "\n".join([_ABOUT, "", *markdown_rows([head, *rows])])


def _rows(number: Printed, compared: Sequence[Compared]) -> list[Sequence[str]]:
    """Our cells of a printed number's method and tasks: of its length, or of all lengths if we have none of its length."""
    groups: dict[tuple, dict[str, Compared]] = {}
    for item in compared:
        row = item.row
        if row["method"].partition("(")[0] == number.method and row["unit"] == "percent" and row.get("depth") is None:
            groups.setdefault((row["length"], row["method"], row["question"]), {})[row["name"]] = item
    whole = {key: cells for key, cells in groups.items() if all(task in cells for task in number.tasks)}
    same = {key: cells for key, cells in whole.items() if key[0] == number.length}
    made = []
    for (length, label, question), cells in (same or whole).items():
        items = [cells[task] for task in number.tasks]
        ours = sum(item.row["value"] for item in items) / len(items)
        loss = sum(item.difference for item in items) / len(items)
        full = number.method == BASELINE
        made.append(
            (
                label,
                number.tasks[0] if len(number.tasks) == 1 else f"mean of {len(number.tasks)}",
                f"{length:,}",
                f"{ours:.1f}",
                "" if full else f"{loss:+.1f}",
                f"{number.value:.2f}",
                "" if full else f"{number.value - number.full:+.1f}",
                f"{number.length:,}",
                _comparable(number, length, items[0].row, question),
                f"{number.paper}, {number.source}",
            )
        )
    return made


def _comparable(number: Printed, length: int, row: Mapping[str, Any], question: str) -> str:
    """ "yes", "open" with what is not printed, or "no" with what differs."""
    wrong = [] if length == number.length else ["length"]
    if question != "prefill":
        wrong.append("the question stands behind the compressed prompt")
    for knob, value in number.knobs.items():
        wanted = budget_tokens(value, length) if knob == "budget" else value
        if row["knobs"].get(knob) != wanted:
            wrong.append(f"{knob} {row['knobs'].get(knob)}, printed {value}")
    if wrong:
        return "no: " + "; ".join(wrong)
    return f"open: {number.open}" if number.open else "yes"
