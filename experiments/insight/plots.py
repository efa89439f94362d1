"""What `experiments.insight` shows: a table and a figure, both from the record."""

from __future__ import annotations

from typing import Any

import numpy as np

from experiments.demo.report import COLORS
from experiments.evaluation.plots import new_figure
from experiments.records import markdown_rows

_LINES = ("-", "--", ":", "-.")
_ACROSS = 4  # methods in a row of the figure

_LEGEND = (
    "Percent, means over samples, layers, KV heads and steps. Attended: chosen tokens. Mass: share of exact attention on "
    "chosen tokens; answer: up to Full's EOS; worst head: the lowest mean of a KV head of a layer. Top k: share of the k "
    "tokens with most exact attention that are chosen; own: of as many as are chosen. Agree: steps at which the method "
    "would have said what Full said, all steps and those of the answer."
)


def table(result: dict[str, Any]) -> str:
    """The record as a markdown table, most mass first.

    Args:
        result: the record of `experiments.insight`.
    """
    top = [str(k) for k in result["settings"]["top"]]
    head = ["method", "attended", "mass", "answer", "worst head", *(f"top {k}" for k in top), "own", "agree", "note"]
    body = [
        [
            m["method"],
            f"{m['attended_tokens']:.0f}",
            *(f"{m[name]:.1f}" for name in ("value", "in_answer", "worst_head")),
            *(f"{m['top_k'][k]:.1f}" for k in top),
            f"{m['own_k']:.1f}",
            f"{m['agreement']:.0f}, {m['agreement_in_answer']:.0f}",
            m["note"],
        ]
        for m in sorted(result["metrics"], key=lambda m: -m["value"])
    ]
    return "\n".join([*markdown_rows([head, *body]), "", _LEGEND])


def draw(result: dict[str, Any]) -> Any:
    """Draws mass by step, mass lost by layer, recall by k; for each method the spread over layers, and a map of heads.

    Args:
        result: the record of `experiments.insight`.

    Returns:
        The figure.
    """
    settings, metrics = result["settings"], result["metrics"]
    mass = [np.asarray(m["mass_by_layer_head_step"]) for m in metrics]  # [L, H, N] each
    lines = -(-len(metrics) // _ACROSS)
    figure = new_figure(14, 4.6 + 2.4 * lines)
    upper, lower = figure.subfigures(2, 1, height_ratios=(4.6, 2.4 * lines))
    panels = upper.subplots(1, 3)
    for index, (m, values) in enumerate(zip(metrics, mass, strict=True)):
        style = _style(index)
        panels[0].plot(_steps(values), values.mean(axis=(0, 1)), label=m["method"], linewidth=1.5, **style)
        panels[1].plot(100 - values.mean(axis=(1, 2)), marker="o", markersize=3.5, linewidth=1.4, **style)
        recall = [*m["top_k"].values(), m["own_k"]]
        panels[2].plot(recall, marker="o", markersize=3.5, linewidth=1.4, **style)
    ends = [end for end in metrics[0]["answer_tokens"] if end < settings["new_tokens"]]
    for end in dict.fromkeys(ends):
        panels[0].axvline(end, color="#999999", linewidth=0.8, linestyle=":")
    panels[0].set(title="attention mass on chosen tokens, %", xlabel="decode step (dotted: Full's answer ends)")
    panels[1].set(title="attention mass lost, %", xlabel="layer")
    panels[2].set(title="best tokens among the chosen, %", xlabel="k (own: as many as were chosen)")
    panels[2].set_xticks(range(len(settings["top"]) + 1), [*map(str, settings["top"]), "own"])
    for panel in panels:
        panel.set_ylim(-2, 103)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_xlim(1, settings["new_tokens"])
    handles, labels = panels[0].get_legend_handles_labels()
    upper.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    _each(lower, metrics, mass, lines)
    text = "Full's text" if settings["text"] == "full" else "each method's own text"
    figure.suptitle(
        f"{settings['task']} at {settings['length']} tokens, {settings['samples']} prompts, {text}; "
        f"{settings['model']} model, {settings['dtype']}; below: mass by step (mean, range of layers), by layer and KV head",
        fontsize=11,
    )
    return figure


def _each(figure: Any, metrics: list[dict[str, Any]], mass: list[np.ndarray], lines: int) -> None:
    """For each method two panels: mass by step with the range over layers, and mean mass by layer and KV head."""
    across = -(-len(metrics) // lines)
    panels = figure.subplots(lines, 2 * across, squeeze=False, width_ratios=[2, 1] * across)
    for panel in panels.flat[2 * len(metrics) :]:
        panel.set_visible(False)
    image = None
    for index, (m, values) in enumerate(zip(metrics, mass, strict=True)):
        curve, heads = panels.flat[2 * index : 2 * index + 2]
        by_layer = values.mean(axis=1)
        style = _style(index)
        curve.fill_between(
            _steps(values), by_layer.min(axis=0), by_layer.max(axis=0), color=style["color"], alpha=0.2, linewidth=0
        )
        curve.plot(_steps(values), by_layer.mean(axis=0), linewidth=1.2, **style)
        curve.set_title(f"{m['method']}, {m['attended_tokens']:.0f} tokens", fontsize=9)
        curve.set_xlim(1, max(2, by_layer.shape[1]))
        curve.set_ylim(-2, 103)
        curve.spines[["top", "right"]].set_visible(False)
        curve.set_xlabel("step", fontsize=8)
        image = heads.imshow(values.mean(axis=2), vmin=0, vmax=100, cmap="viridis", aspect="auto", origin="lower")
        heads.set_xlabel("KV head", fontsize=8)
        heads.set_ylabel("layer", fontsize=8)
        heads.set_xticks(_ticks(values.shape[1]))
        heads.set_yticks(_ticks(values.shape[0]))
        for panel in (curve, heads):
            panel.tick_params(labelsize=7)
    figure.colorbar(image, ax=panels, label="mass, %", shrink=0.8)


def _style(index: int) -> dict[str, str]:
    """Colour and dashes of the method at ``index``."""
    return {"color": COLORS[index % len(COLORS)], "linestyle": _LINES[index // len(COLORS) % len(_LINES)]}


def _steps(values: np.ndarray) -> np.ndarray:
    """Decode steps from 1 on of [L, H, N]."""
    return np.arange(1, values.shape[2] + 1)


def _ticks(count: int) -> range:
    """At most eight of ``count`` places."""
    return range(0, count, -(-count // 8))
