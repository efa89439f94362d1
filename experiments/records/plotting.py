"""One look for every figure: colours, ticks, labels beside lines, colour maps, and the file that a figure becomes.

matplotlib is an optional package, so it is imported inside the functions that draw. No function here touches matplotlib's
global settings or needs a display.
"""

import dataclasses
import importlib.util
import io
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Okabe and Ito's palette, which colour-blind readers can tell apart. The pale yellow comes last.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")
REFERENCE = "#333333"  # lines to compare with: Full, a floor, 100 %
FAINT = "#999999"  # marks that explain, such as the end of an answer
COLOR_MAP = "cividis"  # colours of heat maps: dark is low, light is high, in print without colours too
_DARK = ("#332288", "#882255", "#117733", "#999933", "#661100", "#6699cc", "#aa4499")  # Tol's muted colours: the next seven
_MARKERS = ("o", "s", "^", "D")
_DASHES = ("-", "--", ":", "-.")
_MISSING = "figures need the package 'matplotlib', which is not installed: pip install 'kvjax[plot]'"
_SMALL = 8  # points, size of ticks and of labels beside lines


def check_installed() -> None:
    """Refuse to draw a figure without matplotlib, by a ``ModuleNotFoundError`` that names the extra to install."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(_MISSING)


def with_figures[T](output: T) -> T:
    """Return the output of a measurement, without figures if matplotlib is not installed; a line on standard error says so.

    Args:
        output: a dataclass with a field ``plot``.
    """
    if not vars(output)["plot"] or importlib.util.find_spec("matplotlib") is not None:
        return output
    print(f"kvjax: {_MISSING}; --no-plot leaves this line out", file=sys.stderr)
    return dataclasses.replace(output, plot=False)


def new_figure(width: float, height: float) -> Any:
    """Create an empty figure of a size in inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Any, kind: str = "png") -> bytes:
    """Render a figure as the bytes of a "png", "pdf" or "svg", which are the same whenever it is drawn."""
    import matplotlib

    buffer = io.BytesIO()
    # Text stays text, so that it can be searched and edited; no file holds the time at which it was drawn.
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
    with matplotlib.rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "kvjax"}):
        figure.savefig(buffer, format=kind, metadata=undated)
    return _in_palette(buffer) if kind == "png" else buffer.getvalue()


def _in_palette(drawn: io.BytesIO) -> bytes:
    """Reduce a PNG to its best 256 colours, which makes the file a third or a quarter as large."""
    from PIL import Image  # matplotlib needs it, too

    picture, smaller = Image.open(drawn).convert("RGB"), io.BytesIO()
    few = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(smaller, "PNG", optimize=True)
    return smaller.getvalue()


def tidy(panel: Any, title: str = "", xlabel: str = "", ylabel: str = "", grid: str | None = "both") -> None:
    """Give a panel the common look: a title, two spines, small ticks, a light grid ("x", "y", "both" or None)."""
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(xlabel, fontsize=9)
    panel.set_ylabel(ylabel, fontsize=9)
    panel.spines[["top", "right"]].set_visible(False)
    panel.tick_params(which="both", labelsize=_SMALL)
    panel.set_axisbelow(True)
    if grid is not None:
        panel.grid(axis=grid, alpha=0.25, linewidth=0.6)


def line_style(index: int, nth: int = 0, *, points: bool = True) -> dict[str, Any]:
    """Choose colour, dashes and marker of the series at ``index``, or of its ``nth`` variant; 56 have different styles."""
    colors = (*COLORS, *_DARK)
    turn = index // len(colors) + nth
    style = {"color": colors[index % len(colors)], "linestyle": _DASHES[turn % len(_DASHES)], "linewidth": 1.4}
    if points:
        style |= {"marker": _MARKERS[turn % len(_MARKERS)], "markersize": 3.5}
    return style


def token_label(count: int) -> str:
    """Format a number of tokens for people: 131072 is "128K", 8000 is "8,000"."""
    return f"{count // 1024:,}K" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


def amount_axis(panel: Any, values: Sequence[float], axis: str = "y") -> None:
    """Scale an axis for amounts above zero: from zero on, or logarithmic if they differ by a factor of ten."""
    from matplotlib import ticker

    if max(values) < 10 * min(values):
        panel.set(**{f"{axis}lim": (0, 1.05 * max(values))})
        return
    panel.set(**{f"{axis}scale": "log", f"{axis}lim": (min(values) / 1.1, 1.1 * max(values))})
    scaled = panel.yaxis if axis == "y" else panel.xaxis
    scaled.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    scaled.set_major_formatter(ticker.FuncFormatter(lambda tick, _: f"{tick:,g}"))
    scaled.set_minor_locator(ticker.NullLocator())


def error_bars(panel: Any, x: Sequence[float], intervals: Sequence[Sequence[float]], color: str) -> None:
    """Draw a thin vertical line from the low to the high end of each point's interval."""
    low, high = ([ends[i] for ends in intervals] for i in (0, 1))
    panel.vlines(list(x), low, high, color=color, linewidth=0.9, alpha=0.7)


def text_color(color: str) -> str:
    """Return the colour, or a darker shade of it if text in the colour would be too pale on white."""
    parts = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    bright = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255
    return color if bright < 0.6 else "#" + "".join(f"{round(0.65 * part):02x}" for part in parts)


def legend(figure: Any, panels: Sequence[Any], most: int = 4) -> None:
    """Draw a legend below the panels with every label of the panels, each label once, at most ``most`` in a row."""
    entries = {name: mark for panel in panels for mark, name in zip(*panel.get_legend_handles_labels(), strict=True)}
    if entries:
        across = min(len(entries), most)
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=across, frameon=False, fontsize=_SMALL
        )


def heat_map(panel: Any, grid: np.ndarray, *, numbers: bool = True, **options: Any) -> Any:
    """Draw a table of scores, 0 to 100, float [rows, columns], as colours, dark for low ones.

    NaN is blank. Return the image for a colour bar.
    """
    image = panel.imshow(grid, **{"cmap": COLOR_MAP, "vmin": 0.0, "vmax": 100.0, "aspect": "auto", **options})
    if numbers:
        for (row, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                ink = "white" if value < 50 else "black"
                panel.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color=ink)
    return image


def bar_chart(
    panel: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]], colors: Sequence[str] = COLORS
) -> list[Any]:
    """Draw a horizontal bar for each name, from the top down, of stacked parts (label -> sizes).

    Return the bars of each part.
    """
    begun, bars = [0.0] * len(names), []
    for color, (label, sizes) in zip(colors, parts.items(), strict=False):
        bars.append(panel.barh(range(len(names)), sizes, left=begun, color=color, label=label, height=0.72))
        begun = [left + size for left, size in zip(begun, sizes, strict=True)]
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.05 * max(begun, default=1))
    return bars
