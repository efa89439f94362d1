"""Scores by what tasks ask for: in the question's words, paraphrased, in many entries, in a dialogue, by events."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import PAPERS
from experiments.evaluation.comparison import BASELINE, COUNTED
from experiments.evaluation.reachable import ORACLE, family
from experiments.records import REFERENCE, Curve, chosen, line_style, method_title, name_curves, new_figure, tidy, token_label
from experiments.tasks import GROUPS

KINDS = ("literal", "paraphrased", "logs", "dialogues", "events")  # groups of tasks
_NAMED = 12  # methods with a name in the figure
_LITERAL = "_literal"
Setting = tuple[str, str, int | None]  # method, place of the question, length


def by_kind(rows: Sequence[Mapping[str, Any]]) -> dict[Setting, dict[str, float]]:
    """Compute the mean score of each setting by kind, over the tasks on which Full scores at least `COUNTED`.

    A literal twin counts if its paraphrase does, so that both means are over the same people and places. A setting that lacks
    one of a kind's tasks has no mean of this kind.
    """
    scores: dict[Setting, dict[str, float]] = {}
    for row in (row for row in rows if row["unit"] == "percent"):
        scores.setdefault((row["method"], row["question"], row.get("length")), {})[row["name"]] = row["value"]
    means: dict[Setting, dict[str, float]] = {}
    for (method, question, length), mine in scores.items():
        full = scores.get((BASELINE, question, length), {})
        counted = {
            kind: [name for name in GROUPS[kind] if full.get(name.removesuffix(_LITERAL), 0) >= COUNTED] for kind in KINDS
        }
        means[method, question, length] = {
            kind: float(np.mean([mine[name] for name in names]))
            for kind, names in counted.items()
            if names and all(name in mine for name in names)
        }
    return means


def paraphrase(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Plot the score of paraphrased facts against the score of their literal twins, a point for each method.

    A method below the diagonal loses what the question does not name. The oracle, the methods of papers and those that lose
    most have names. Of several lengths and places of the question, those of most methods are drawn.
    """
    points = {
        setting: (means["literal"], means["paraphrased"])
        for setting, means in by_kind(rows).items()
        if {"literal", "paraphrased"} <= means.keys()
    }
    if not points:
        raise ValueError(
            "a plot of paraphrase needs tasks of the group paraphrased, which Full solves, and their literal twins, got "
            f"{', '.join(dict.fromkeys(str(row['name']) for row in rows)) or 'no scores'}"
        )
    question, length = max(points, key=lambda setting: sum(setting[1:] == other[1:] for other in points))[1:]
    points = {setting: point for setting, point in points.items() if setting[1:] == (question, length)}
    title = {setting: method_title(setting[0]) for setting in points if setting[0] != BASELINE}
    losing = sorted(title, key=lambda setting: points[setting][1] - points[setting][0])
    known = [setting for setting in title if family(setting[0]) == ORACLE]
    papers = [setting for name in PAPERS for setting in title if setting[0] == name]
    names = chosen(title, [*known, *papers, *losing], _NAMED)
    figure = new_figure(6.5, 6)
    panel = figure.subplots()
    panel.plot((0, 50, 100), (0, 50, 100), color=REFERENCE, linestyle="--", linewidth=1)
    curves = []
    for setting, point in points.items():
        style = line_style(names.index(setting)) if setting in names else {"color": "#c4c4c4", "marker": "o", "markersize": 3}
        style |= {"color": REFERENCE, "marker": "*", "markersize": 11} if setting[0] == BASELINE else {}
        panel.plot(*point, **{**style, "linestyle": ""})
        if setting in names or setting[0] == BASELINE:
            curves.append(Curve(title.get(setting, "Full"), style["color"], [point]))
    panel.set(xlim=(-4, 104), ylim=(-4, 104))
    place = {"prefill": "in the prompt", "extend": "after the context"}.get(question, "in turns")
    tidy(
        panel,
        f"{token_label(length or 0)} tokens, question {place}",
        "score where the fact has the question's words",
        "score where the fact is paraphrased",
    )
    name_curves(panel, curves, [point for setting, point in points.items() if setting not in names])
    return figure
