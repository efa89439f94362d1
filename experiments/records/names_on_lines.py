"""Names of curves inside of a panel, placed by adjustText; a few curves have a colour and a name, the others are grey."""

import dataclasses
import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy.optimize import isotonic_regression

from experiments.records.plotting import text_color

MOST = 7  # curves of a panel that have a colour and a name: as many as there are colours
QUIET = {"color": "#c4c4c4", "linewidth": 0.9, "marker": "o", "markersize": 2.2, "zorder": 1}  # of all other curves
_SMALL = 8  # points, size of a name
_GAP = 0.05  # least distance of two names, as a share of a panel's height


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
    """Write the name of each curve near its last point, apart from lines, names and the points of ``others``.

    Call it when the panel has its final limits and its curves.
    """
    from adjustText import adjust_text
    from matplotlib import patheffects

    panel.get_figure(root=True).draw_without_rendering()  # the layout decides how much of a panel a name takes
    style = {"fontsize": _SMALL, "va": "center", "ha": "center"}
    texts = [panel.text(*curve.points[-1], curve.name, color=text_color(curve.color), **style) for curve in curves]
    x, y = zip(*(point for curve in curves for point in _along(panel, curve.points)), *others, strict=True)
    forces = {"expand": (1.15, 1.3), "force_text": (0.5, 0.5), "force_static": (0.1, 0.2)}  # no two names of our records meet
    # Steps are counted, or the library would stop after a second of time, and figures differ from run to run.
    adjust_text(texts, x, y, ax=panel, ensure_inside_axes=True, iter_lim=500, **forces)
    for text, curve in zip(texts, curves, strict=True):
        ends = zip(curve.points[-1], text.get_position(), strict=True)
        panel.plot(*ends, color=curve.color, linewidth=0.5, alpha=0.6, zorder=0, scalex=False, scaley=False)
        text.set_path_effects([patheffects.withStroke(linewidth=2.5, foreground="white")])  # legible on a line, too


def _along(panel: Any, points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Divide the line through the points, as a panel shows it, into eight pieces between two points."""
    at = panel.transData.transform(points)
    shares = np.linspace(0, 1, 8, endpoint=False)[:, None]
    between = [first + shares * (last - first) for first, last in itertools.pairwise(at)]
    return panel.transData.inverted().transform(np.concatenate([*between, at[-1:]])).tolist()


def label_lines(panel: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write the name of each line (x, y, name, colour) at its right end, in the panel, which is widened.

    Close names move apart. Call it when the panel has its final limits.
    """
    if not ends:
        return
    figure, scale = panel.get_figure(root=True), panel.xaxis.get_transform()
    figure.draw_without_rendering()  # the layout decides how much of a panel a name takes
    letters, across = max(len(name) for _, _, name, _ in ends), panel.get_window_extent().width / figure.dpi * 72
    free = min(0.62 * _SMALL * letters / across + 0.05, 0.6)  # of the panel; a letter is about 0.62 of its size wide
    left, right = scale.transform(panel.get_xlim())
    panel.set_xlim(right=float(scale.inverted().transform([left + (right - left) / (1 - free)])[0]))
    to_share = panel.transData + panel.transAxes.inverted()
    at = to_share.transform([(x, y) for x, y, _, _ in ends])
    heights = _GAP / 2 + (1 - _GAP) * spread((at[:, 1] - _GAP / 2) / (1 - _GAP), _GAP / (1 - _GAP))
    for (x, y, name, color), height in zip(ends, heights.tolist(), strict=True):
        panel.annotate(
            name,
            xy=(x, y),
            xytext=(at[:, 0].max() + 0.025, height),
            textcoords="axes fraction",
            va="center",
            fontsize=_SMALL,
            color=text_color(color),
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 2},
        )


def spread(wanted: Sequence[float], gap: float) -> np.ndarray:
    """Move numbers as little as possible until they are at least ``gap`` apart, in [0, 1] if all fit; their order stays."""
    order = np.argsort(wanted, kind="stable")
    steps = gap * np.arange(len(order))
    moved = np.empty(len(order))
    moved[order] = np.clip(isotonic_regression(np.asarray(wanted)[order] - steps).x, 0, max(1 - steps[-1], 0)) + steps
    return moved


def quiet_label(names: Sequence[str], most: int = 90) -> str:
    """Write the entry of a legend for the curves in grey, in lines of at most ``most`` letters."""
    return textwrap.fill(f"other methods: {', '.join(names)}", most, break_on_hyphens=False)
