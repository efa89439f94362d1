"""Makes the row of a method on a stream: means over texts with their intervals, and the values of every text and step."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lab.fidelity.distance import Distance
from experiments.records import bootstrap_interval

FULL = "full"
DEPTH = 4  # tokens that a draft of `kvjax.Verified` decodes before a pass, by default
_PIECES = 16  # a text is averaged over so many pieces, as a figure shows it


def summary(parts: Sequence[tuple[int, Distance]], counts: np.ndarray) -> dict[str, Any]:
    """Average distances into a metric for `experiments.records.make_record`.

    A text counts with the mean over its steps, so that long texts do not weigh more. Perplexity is the exponential of the
    mean of the texts' losses. Intervals are bootstrap intervals over texts; the interval of the ratio of perplexities is
    paired.

    Args:
        parts: (number of texts, distances) of every batch; rows behind that number are copies.
        counts: int32 [N], number of steps of every text.
    """
    steps = {
        name: np.concatenate([np.asarray(getattr(apart, name), np.float64)[:, :real] for real, apart in parts], axis=1)
        for name in ("kl", "agrees", "loss", "full_loss")
    }  # [T, N] each
    inside = np.arange(len(steps["kl"]))[:, None] < counts[None]
    by_text = {name: np.sum(values * inside, axis=0) / counts for name, values in steps.items()}
    at = inside.any(axis=1)
    by_step = {name: np.sum(values * inside, axis=1)[at] / inside.sum(axis=1)[at] for name, values in steps.items()}
    extra = by_text["loss"] - by_text["full_loss"]
    per_pass = np.array([tokens_per_pass(agrees[:count]) for agrees, count in zip(steps["agrees"].T, counts, strict=True)])
    return {
        "name": "kl",
        "value": short(by_text["kl"].mean()),
        "unit": "nats per token",
        "interval_95": [short(end) for end in bootstrap_interval(by_text["kl"])],
        "agreement": short(100 * by_text["agrees"].mean()),
        "agreement_interval_95": [short(100 * end) for end in bootstrap_interval(by_text["agrees"])],
        "accepted": short(per_pass.mean()),
        "accepted_interval_95": [short(end) for end in bootstrap_interval(per_pass)],
        "perplexity": short(np.exp(by_text["loss"].mean())),
        "full_perplexity": short(np.exp(by_text["full_loss"].mean())),
        "perplexity_ratio": short(np.exp(extra.mean())),
        "perplexity_ratio_interval_95": [short(np.exp(end)) for end in bootstrap_interval(extra)],
        "texts": len(counts),
        "steps": int(counts.sum()),
        "by_text": {name: [short(x) for x in by_text[name]] for name in ("kl", "agrees", "loss")},
        "along": along({name: by_step[name] for name in ("kl", "agrees")}),
    }


def tokens_per_pass(agrees: np.ndarray) -> float:
    """Compute the tokens per pass of a draft of `kvjax.Verified` along a text, from the steps at which it agrees with Full.

    A pass begins with a token of Full's. Its drafted tokens are kept up to the first step that does not agree, and the next
    pass begins behind that step, or behind the step after `DEPTH` that agree. The text decides what stands before each
    step, so neither Full nor the draft follows its own tokens.

    Args:
        agrees: [T], 1 where both have the same most likely token, else 0.

    Returns:
        Steps per pass, 1 to ``DEPTH + 1``. A pass that the end of the text cuts short does not count, unless it is the only
        one.
    """
    at = passes = 0
    while at < len(agrees):
        kept = int(np.cumprod(agrees[at : at + DEPTH]).sum())
        if at + kept >= len(agrees) and passes:
            break
        at, passes = min(at + kept + 1, len(agrees)), passes + 1
    return at / passes


def short(value: float) -> float:
    """Round to five significant digits."""
    return float(f"{value:.5g}")


def along(by_step: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Average values of steps over at most `_PIECES` equal pieces of a text; the middle steps are counted from 1."""
    by_step = {name: np.asarray(values) for name, values in by_step.items()}
    count = min(len(values) for values in by_step.values())
    parts = np.array_split(np.arange(count), min(_PIECES, count))
    means = {name: [short(values[part].mean()) for part in parts] for name, values in by_step.items()}
    return {"steps": [float(part.mean()) + 1 for part in parts], **means}
