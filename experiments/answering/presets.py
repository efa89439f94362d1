"""Methods at the budgets of their papers, and baselines at an eighth of the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import kvjax
from experiments.answering.ask import pad
from experiments.answering.cell import LoadedModel
from experiments.answering.prompts import Cell, make_prompts
from experiments.records.resumable import Results
from experiments.tasks import get_task
from kvjax import registry
from kvjax.method import Method

PAPERS = ("chess", "sentencekv", "tokenselect", "mosaickv", "pariskv")
BASELINES = ("quest", "snapkv", "streamingllm", "h2o", "keydiff")
BASELINE_SHARE = 8  # of the context
METHODS = ("full", *PAPERS, *BASELINES)
CALIBRATION_SEED = 1_000_003  # added to the seed of the samples, so that calibration prompts are others


QUESTION_PLACES = ("auto", "prefill", "extend")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One method as it is run."""

    name: str
    method: Method
    note: str  # what is not the paper's own, "" if nothing


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How CHESS gets its thresholds: full-attention generations on held-out prompts, past the end of the answer."""

    tasks: tuple[str, ...]
    length: int
    prompts: int
    new_tokens: int
    seed: int


def paper_method(
    name: str, length: int, *, tokenizer: Any, config: Any, given: Mapping[str, Any] | None = None
) -> Setting:
    """A method at its paper's budget, scaled down where that would not fit into half of the context.

    Args:
        name: method name.
        length: tokens of context, question and answer.
        tokenizer: for methods that read text.
        config: the model.
        given: knobs that go before the paper's.

    Raises:
        ValueError: unknown method or knob, or a value the method refuses.
    """
    name = name.lower()
    registry.make(name)  # refuses unknown names
    knobs, note = _SCALED[name](length) if name in _SCALED else ({}, "")
    if name in BASELINES:
        knobs, note = {"budget": length // BASELINE_SHARE}, f"1/{BASELINE_SHARE} of the context"
    if knobs.keys() & (given or {}).keys():  # it speaks of these
        note = ""
    return Setting(name, registry.make(name, tokenizer, config.vocab_size, **{**knobs, **(given or {})}), note)


def question_place(method: Method, place: str) -> str:
    """Where the question stands, "prefill" or "extend": "auto" lets methods see it that choose by a prompt's last queries."""
    if place == "auto":
        return "prefill" if method.composable and method.obs_window > 0 else "extend"
    return place


def budget_tokens(share: str | int | float, length: int) -> int:
    """``1/8`` or ``0.125`` of a length, or a number of tokens.

    Raises:
        ValueError: it is neither.
    """
    top, _, bottom = str(share).strip().partition("/")
    try:
        value = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if not (0 < value <= 1 or (value > 1 and value.is_integer() and not bottom)):
        raise ValueError(f"a budget is a share such as 1/8 or a number of tokens such as 256, got {share!r}")
    return round(value * length) if bottom or value < 1 else int(value)


def _share(total: int, length: int) -> tuple[float, str]:
    """Factor that takes `total` tokens to a quarter of a context of which they are more than half, else 1; and a note."""
    if 2 * total <= length:
        return 1.0, ""
    share = length / 4 / total
    return share, f"the paper's {total} tokens scaled by {share:.3f} to fit {length}"


def _tokenselect(length: int) -> tuple[dict[str, Any], str]:
    share, note = _share(128 + 2048 + 512, length)
    local = max(int(512 * share), 1)
    budget, sinks = max(int(2048 * share), 1), int(128 * share)
    return {"budget": budget, "num_sink": sinks, "num_local": local, "chunk": local, "theta": 0.9}, note


def _pariskv(length: int) -> tuple[dict[str, Any], str]:
    share, note = _share(2000, length)  # rows below 2000 tokens are dense
    whole = {"budget": 100, "num_sink": 64, "num_local": 256, "buffer": 512, "dense_below": 2000}
    return {knob: max(int(value * share), 1) for knob, value in whole.items()}, note


def _sentencekv(length: int) -> tuple[dict[str, Any], str]:
    share, note = _share(2 * 1024, length)  # it keeps twice its budget
    # Less than this is not a budget beside 32 sink and 32 recent tokens.
    return {"budget": max(int(1024 * share), 80), "keep_factor": 2.0}, note


def _mosaickv(length: int) -> tuple[dict[str, Any], str]:
    return {"channels": 0.25, "fraction": 0.10, "strategy": "static"}, ""


def _chess(length: int) -> tuple[dict[str, Any], str]:
    window = 8
    while window > 1 and 2 * (1 + window) * 32 > length:
        window //= 2
    note = f"window of {window} pages, 8 would be more than half of {length} tokens" if window < 8 else ""
    return {"ratios": "aggressive", "trigger": "and", "window": window}, note


_SCALED: dict[str, Callable[[int], tuple[dict[str, Any], str]]] = {
    "tokenselect": _tokenselect,
    "pariskv": _pariskv,
    "sentencekv": _sentencekv,
    "mosaickv": _mosaickv,
    "chess": _chess,
}


def calibration_tokens(model: LoadedModel, calibration: Calibration) -> tuple[np.ndarray, np.ndarray]:
    """Held-out prompts, the tasks taking turns: int32 [prompts, length], padded, and int32 [prompts]."""
    each = -(-calibration.prompts // len(calibration.tasks))
    made = [
        make_prompts(
            model.tokenizer_file, Cell(task, calibration.length, each, calibration.seed + CALIBRATION_SEED)
        ).tokens
        for task in calibration.tasks
    ]
    rows = [tokens[index] for index in range(each) for tokens in made][: calibration.prompts]
    return pad(rows, calibration.length)


def needs_thresholds(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a method with these knobs is CHESS with a trigger that `chess_thresholds` must set."""
    return name == "chess" and given.get("trigger", "and") in ("and", "or")


def chess_thresholds(model: LoadedModel, calibration: Calibration, results: Results) -> dict[str, float]:
    """CHESS's thresholds as knobs; kept in the record, and taken from there where it has them for this calibration."""
    settings = {**dataclasses.asdict(calibration), "tasks": list(calibration.tasks)}
    stored = results.notes.get("chess_calibration")
    if stored is None or stored["settings"] != settings:
        for task in calibration.tasks:
            get_task(task)
        tokens, lengths = calibration_tokens(model, calibration)
        method = kvjax.calibrate_chess(
            model.params,
            tokens,
            config=model.config,
            method=registry.make("chess"),
            lengths=lengths,
            max_new_tokens=calibration.new_tokens,
            eos_token_ids=(),
        )
        stored = {
            "settings": settings,
            "quantile": 0.99,
            "tau_entropy": method.tau_entropy,
            "tau_varentropy": method.tau_varentropy,
        }
        results.note("chess_calibration", stored)
    return {name: stored[name] for name in ("tau_entropy", "tau_varentropy")}


def read_settings(pairs: Sequence[str], parse: Callable[[str, Sequence[str]], dict[str, Any]]) -> dict[str, dict]:
    """Knobs by method from texts `method.knob=value`.

    Raises:
        ValueError: a text without a dot before its equals sign, an unknown method, or what `parse` refuses.
    """
    grouped: dict[str, list[str]] = {}
    for pair in pairs:
        name, dot, rest = pair.partition(".")
        if not dot or "=" in name:
            raise ValueError(f"--set takes METHOD.KNOB=VALUE, got {pair!r}")
        grouped.setdefault(name.strip().lower(), []).append(rest)
    for name in grouped:
        registry.make(name)  # refuses unknown names
    return {name: parse(name, texts) for name, texts in grouped.items()}
