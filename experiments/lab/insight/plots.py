"""Draws a record of `experiments.lab.insight`: mass by layer, recall by k, and each method's mass by step and KV head."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.records import FAINT, heat_map, label_lines, method_styles, method_title, new_figure, tidy

_ACROSS = 4  # methods in a line of the lower part


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figures of a record, for ``kvjax plot``: functions by name, and the names of the usual figures."""
    draws = functools.partial(draw, record)
    return {"insight": draws, "recall": draws}, ["insight"]


def draw(record: Mapping[str, Any]) -> Any:
    """Draw the figure of a record.

    The upper part compares methods: attention mass on the chosen tokens by layer, and recall of the k best tokens. The lower
    part has two panels for each method: mass by step with the range over layers, and mean mass by layer and KV head.

    Args:
        record: the record of `experiments.lab.insight`.
    """
    settings, metrics = record["settings"], record["metrics"]
    mass = [np.asarray(m["mass_by_layer_head_step"]) for m in metrics]  # [L, H, N] each
    lines = -(-len(metrics) // _ACROSS)
    upper_height = 1.6 + 0.3 * max(len(metrics), 8)
    figure = new_figure(14, upper_height + 2.4 * lines)
    upper, lower = figure.subfigures(2, 1, height_ratios=(upper_height, 2.4 * lines))
    layers, recall = upper.subplots(1, 2, width_ratios=(1.25, 1))
    _by_layer(layers, metrics, mass)
    _by_k(recall, metrics, settings["top"])
    _each(lower, metrics, mass, lines, settings)
    text = "Full's text" if settings["text"] == "full" else "each method's own text"
    figure.suptitle(
        f"{settings['task']} at {settings['length']:,} tokens, {settings['samples']} prompts, {text}; "
        f"{settings['model']} model, {settings['dtype']}",
        fontsize=11,
    )
    return figure


def _by_layer(panel: Any, metrics: Sequence[Mapping[str, Any]], mass: Sequence[np.ndarray]) -> None:
    """Plot the mean mass on chosen tokens: a row per method, a column per layer, and the mean over layers at the right."""
    grid = np.stack([values.mean(axis=(1, 2)) for values in mass])
    heat_map(panel, grid)
    tidy(panel, "attention mass on chosen tokens, %  (mean over layers at the right)", "layer", "method", grid=None)
    panel.set_xticks(_ticks(grid.shape[1]))
    panel.set_yticks(range(len(metrics)), [method_title(m["method"]) for m in metrics])
    for row, value in enumerate(grid.mean(axis=1)):
        panel.text(grid.shape[1] - 0.4, row, f"{value:.0f}", va="center", fontsize=8)


def _by_k(panel: Any, metrics: Sequence[Mapping[str, Any]], top: Sequence[int]) -> None:
    """Plot the share of the k best tokens among the chosen, for each k and for as many tokens as a method chooses."""
    ends = []
    for metric, style in zip(metrics, method_styles([m["method"] for m in metrics]), strict=True):
        recall = [*metric["top_k"].values(), metric["own_k"]]
        panel.plot(recall, **style)
        ends.append((len(recall) - 1, recall[-1], method_title(metric["method"]), style["color"]))
    panel.set_xticks(range(len(top) + 1), [*map(str, top), "own"])
    panel.set_ylim(0, 100)
    tidy(panel, "best k tokens among the chosen", "k (own: as many as were chosen)", "% of the best k")
    label_lines(panel, ends)


def _each(
    figure: Any, metrics: Sequence[Mapping[str, Any]], mass: Sequence[np.ndarray], lines: int, settings: Mapping[str, Any]
) -> None:
    """Plot two panels for each method: mass by step with the range over layers, and mean mass by layer and KV head."""
    across = -(-len(metrics) // lines)
    panels = figure.subplots(lines, 2 * across, squeeze=False, width_ratios=[2, 1] * across)
    for panel in panels.flat[2 * len(metrics) :]:
        panel.set_visible(False)
    ends = dict.fromkeys(end for end in metrics[0]["answer_tokens"] if end < settings["new_tokens"])
    image = None
    styles = method_styles([m["method"] for m in metrics], points=False)
    for index, (m, values, style) in enumerate(zip(metrics, mass, styles, strict=True)):
        curve, heads = panels.flat[2 * index : 2 * index + 2]
        by_layer = values.mean(axis=1)
        steps = np.arange(1, values.shape[2] + 1)
        low, high = by_layer.min(axis=0), by_layer.max(axis=0)
        curve.fill_between(steps, low, high, color=style["color"], alpha=0.2, linewidth=0)
        curve.plot(steps, by_layer.mean(axis=0), **style)
        for end in ends:
            curve.axvline(end, color=FAINT, linewidth=0.8, linestyle=":")
        curve.set_xlim(1, max(2, by_layer.shape[1]))
        curve.set_ylim(0, 100)
        tidy(curve, f"{method_title(m['method'])}, {m['attended_tokens']:.0f} tokens", "decode step", "mass, %")
        image = heat_map(heads, values.mean(axis=2), numbers=False, origin="lower")
        tidy(heads, "", "KV head", "layer", grid=None)
        heads.set_xticks(_ticks(values.shape[1]))
        heads.set_yticks(_ticks(values.shape[0]))
    figure.colorbar(image, ax=panels, label="mass, %", shrink=0.95)
    title = "mass by decode step (line: mean; band: range of layers; dotted: Full's answer ends), and by layer and KV head"
    figure.suptitle(title, fontsize=10)


def _ticks(count: int) -> range:
    """Pick at most eight of ``count`` positions, evenly spaced."""
    return range(0, count, -(-count // 8))
