"""Which figures a result can be drawn in, whatever experiment made it."""

from __future__ import annotations

import difflib
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.evaluation import plots
from experiments.evaluation.folder import read_rows
from experiments.insight import plots as insight_plots
from experiments.speed import plots as speed_plots


def figures(path: pathlib.Path, kinds: Sequence[str]) -> list[tuple[str, Callable[[str], bytes]]]:
    """The figures of a result folder, or of a record.

    Args:
        path: folder of `eval` or `sweep`, or JSON record of `experiments.speed` or `experiments.insight`.
        kinds: names; none takes all that apply.

    Returns:
        File name without its ending, and a function of "png" or "pdf" that draws and returns the file's bytes.

    Raises:
        ValueError: no result, or a kind that it cannot be drawn in.
    """
    found = read_rows(path)
    known, usual = _known(found)
    for kind in kinds:
        if kind not in known:
            near = difflib.get_close_matches(kind, known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{path} cannot be drawn as {kind!r}{hint} expected one of {', '.join(known)}")
    rows = found["metrics"]
    made = []
    for kind in kinds or usual:
        name = kind if path.is_dir() else f"{path.stem}-{kind}"
        made.append((name, functools.partial(_draw, known[kind], rows)))
    return made


def _draw(draw: Callable[[Sequence[Any]], Any], rows: Sequence[Any], kind: str) -> bytes:
    return plots.save(draw(rows), kind)


def _known(found: Mapping[str, Any]) -> tuple[dict[str, Callable[[Sequence[Any]], Any]], list[str]]:
    """All kinds of a record, and those drawn unasked."""
    if found["experiment"] in ("eval", "sweep"):
        return plots.KINDS, plots.default_kinds(found["metrics"])
    if found["experiment"] == "speed":
        return speed_plots.KINDS, speed_plots.default_kinds(found["metrics"])
    if found["experiment"] == "insight":
        return {"recall": lambda rows: insight_plots.draw(found)}, ["recall"]
    raise ValueError(f"a record of {found['experiment']!r} has no figures here: eval, sweep, speed and insight have")
