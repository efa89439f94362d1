"""Names of curves inside of a panel: a few beside their curves, where nothing else is, and the other curves in grey."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from experiments.records.plotting import spread, text_color

MOST = 7  # curves of a panel that have a colour and a name: as many as there are colours
QUIET = {"color": "#c4c4c4", "linewidth": 0.9, "marker": "o", "markersize": 2.2, "zorder": 1}  # of all other curves
_SMALL = 8  # points, size of a name
_SIDES = [(x, y) for x, y in itertools.product((1, 0, -1), repeat=2) if (x, y) != (0, 0)]
_GAPS = (0.012, 0.03, 0.06, 0.1, 0.16, 0.24)  # from a point to its name, as shares of the panel
_FAR = 0.03  # from this gap on a thin line joins a name and its point


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve with a name.

    Attributes:
        name: the name.
        color: "#rrggbb".
        points: (x, y) of its points, in units of the data, from left to right.
    """

    name: str
    color: str
    points: Sequence[tuple[float, float]]


def chosen(names: Iterable[str], wanted: Iterable[str], most: int = MOST) -> list[str]:
    """Choose the curves that have a colour and a name: all if they are few, else the first of ``wanted`` that exist."""
    known = list(dict.fromkeys(names))
    return known if len(known) <= most else [name for name in dict.fromkeys(wanted) if name in known][:most]


def name_curves(panel: Any, curves: Sequence[Curve], others: Sequence[tuple[float, float]] = ()) -> None:
    """Write the name of each curve beside one of its points, inside of the panel, over as few points and names as can be.

    Call it when the panel has its final limits and its curves.

    Args:
        panel: axes of matplotlib.
        curves: the curves to name.
        others: (x, y) of further points that names should leave free.
    """
    figure = panel.get_figure(root=True)
    figure.draw_without_rendering()  # the layout decides how much of a panel a name takes
    to_share = panel.transData + panel.transAxes.inverted()
    lines = [to_share.transform(np.asarray(curve.points, float)) for curve in curves]
    ink = np.concatenate([_along(line) for line in lines] + [to_share.transform(np.asarray(others, float).reshape(-1, 2))])
    taken: list[tuple[float, float, float, float]] = []
    for curve, line in sorted(zip(curves, lines, strict=True), key=lambda pair: len(pair[1])):
        width, height = _size(panel, curve.name)
        at, gap, point = _place(line, width, height, ink, taken)
        taken.append((at[0], at[1], width, height))
        panel.annotate(
            curve.name,
            xy=tuple(point),
            xycoords="axes fraction",
            xytext=at,
            textcoords="axes fraction",
            ha="center",
            va="center",
            fontsize=_SMALL,
            color=text_color(curve.color),
            arrowprops={"arrowstyle": "-", "color": curve.color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
            if gap >= _FAR
            else None,
        )


def quiet_label(names: Sequence[str], most: int = 90) -> str:
    """Write the entry of a legend for the curves in grey, in lines of at most ``most`` letters."""
    lines = ["other methods:"]
    for name in (f"{name}{',' * (name != names[-1])}" for name in names):
        if len(lines[-1]) + len(name) >= most:
            lines.append("")
        lines[-1] += f" {name}"
    return "\n".join(line.strip() for line in lines)


def widen(panel: Any, names: Sequence[str]) -> None:
    """Move the right limit of the x axis so that the longest of the names fits between the data and the panel's edge."""
    panel.get_figure(root=True).draw_without_rendering()
    free = min(max((_size(panel, name)[0] for name in names), default=0.0) + 0.05, 0.6)
    scale = panel.xaxis.get_transform()
    left, right = scale.transform(np.asarray(panel.get_xlim(), float))
    panel.set_xlim(right=float(scale.inverted().transform(np.asarray([left + (right - left) / (1 - free)]))[0]))


def label_lines(panel: Any, ends: Sequence[tuple[float, float, str, str]], gap: float = 0.05) -> None:
    """Write the name of each line at its right end, inside of the panel, which is widened; close names move apart.

    Call it when the panel's axes have their final limits.

    Args:
        panel: axes of matplotlib.
        ends: (x, y, name, colour) of the last point of each line, in units of the data.
        gap: least distance of two names, as a share of the panel's height.
    """
    if not ends:
        return
    widen(panel, [name for _, _, name, _ in ends])
    to_share = panel.transData + panel.transAxes.inverted()
    points = [tuple(map(float, to_share.transform((x, y)))) for x, y, _, _ in ends]
    left = max(x for x, _ in points) + 0.025
    shares = spread([min(max(y, gap / 2), 1 - gap / 2) for _, y in points], gap)
    for (x, y, name, color), share in zip(ends, shares, strict=True):
        panel.annotate(
            name,
            xy=(x, y),
            xytext=(left, min(max(share, gap / 2), 1 - gap / 2)),
            textcoords="axes fraction",
            va="center",
            fontsize=_SMALL,
            color=text_color(color),
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2},
        )


def _size(panel: Any, name: str) -> tuple[float, float]:
    """Measure the width and height of a name as shares of the panel."""
    text = panel.text(0, 0, name, fontsize=_SMALL)
    box = text.get_window_extent(panel.get_figure(root=True).canvas.get_renderer())
    text.remove()
    outer = panel.get_window_extent()
    return box.width / outer.width, box.height / outer.height


def _along(line: np.ndarray, steps: int = 12) -> np.ndarray:
    """Return points [N, 2] along the straight lines between the points of a curve."""
    if len(line) == 1:
        return line
    at = np.linspace(0, 1, steps)[:, None]
    return np.concatenate([a + at * (b - a) for a, b in itertools.pairwise(line)])


def _place(
    line: np.ndarray, width: float, height: float, ink: np.ndarray, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[tuple[float, float], float, np.ndarray]:
    """Find the centre of a name inside of the panel, its gap from the curve, and the point of the curve that it names."""
    best: tuple[float, tuple[float, float], float, np.ndarray] | None = None
    last = len(line) - 1
    for index, gap, (side_x, side_y) in itertools.product(range(len(line)), _GAPS, _SIDES):
        x = float(line[index][0]) + side_x * (width / 2 + gap)
        y = float(line[index][1]) + side_y * (height / 2 + gap)
        x = min(max(x, width / 2 + 0.005), 1 - width / 2 - 0.005)
        y = min(max(y, height / 2 + 0.005), 1 - height / 2 - 0.005)
        covered = (abs(ink[:, 0] - x) < width / 2 + 0.006) & (abs(ink[:, 1] - y) < height / 2 + 0.006)
        clashes = sum(abs(a - x) < (w + width) / 2 and abs(b - y) < (h + height) / 2 for a, b, w, h in taken)
        cost = 100 * clashes + 3 * covered.sum() + 40 * gap + 0.2 * (last - index) + 0.1 * (side_x < 1)
        if best is None or cost < best[0]:
            best = cost, (x, y), gap, line[index]
    assert best is not None  # a curve has points
    return best[1], best[2], best[3]
