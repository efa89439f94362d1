"""A grid of a method's hyper-parameters; settings of equal structure share a compiled program.

`kvjax.sweep` maps the whole run over all settings and prefills a dense prompt once for all of them. Each setting and cell has
a row, Full first, in a folder of the form that `eval` writes, so that `compare` and `plot` read it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

import kvjax
from experiments.answering import (
    account,
    batch_rows,
    budget_tokens,
    pad,
    padded_length,
    read_knobs,
    reads_all,
    resolve_question,
)
from experiments.benchmarks import Encoded
from experiments.evaluation.answers import predict, summary
from experiments.evaluation.runner import Runner
from experiments.evaluation.settings import Choice, EvaluationSettings, check_knobs
from experiments.records import CompileClock, Timer, knobs_of
from kvjax import registry
from kvjax.decoding.layers import check_quantisable, layer_methods
from kvjax.methods.chess.method import PRESETS
from kvjax.protocol.method import Method
from models.hub.progress import is_drawn, progress_bar, say

_LONG = 1 << 20  # tokens, to compare budgets that are shares with budgets in tokens


@dataclasses.dataclass(frozen=True)
class Grid:
    """Settings of a method.

    Attributes:
        name: the method.
        fixed: values of the knobs that are the same in all settings; no such knob is in ``varied``.
        varied: values by knob; the settings are all combinations, and the last knob varies fastest.
    """

    name: str
    fixed: Mapping[str, Any]
    varied: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        check_knobs(self.name, self.fixed)
        for knob, values in self.varied.items():
            for value in values:
                check_knobs(self.name, {knob: value})
        if both := self.fixed.keys() & self.varied.keys():
            raise ValueError(f"{', '.join(sorted(both))} is given one value and a grid of values, expected one of the two")

    def choices(self) -> list[Choice]:
        """List the settings.

        The arrays that a method allocates decide its program. So all settings get room for the largest budget, fraction or
        ratios, unless `capacity` is fixed.
        """
        known = [knob.name for knob in registry.knobs(registry.find(self.name))]
        fixed = dict(self.fixed)
        free = "capacity" in known and "capacity" not in fixed and "capacity" not in self.varied
        if free and (sizes := self.varied.get("budget") or self.varied.get("fraction")):
            fixed["capacity"] = max(sizes, key=lambda size: budget_tokens(size, _LONG))
        if free and (ratios := self.varied.get("ratios")):
            named = [PRESETS.get(shares, shares) if isinstance(shares, str) else shares for shares in ratios]
            fixed["capacity"] = tuple(max(shares) for shares in zip(*named, strict=True))
        names = list(self.varied)
        return [
            Choice(self.name, {**dict(zip(names, values, strict=True)), **fixed})
            for values in itertools.product(*self.varied.values())
        ]


def the_grid(settings: EvaluationSettings, texts: Sequence[str]) -> Grid:
    """Make the grid of the settings' only method from texts KNOB=V1,V2,..., and refuse what cannot be run."""
    if len(settings.methods) != 1 or settings.budgets:
        got = f"{', '.join(choice.label for choice in settings.methods)}{' and --budgets' * bool(settings.budgets)}"
        raise ValueError(f"--grid varies the knobs of one method, budgets too: expected one in --methods, got {got}")
    if settings.question == "turns":
        raise ValueError("--grid needs questions in the prompt or after it, got question='turns'")
    (choice,), varied = settings.methods, {}
    for text in texts:
        knob, equals, values = text.partition("=")
        knob = knob.strip()
        if not equals or not values.strip():
            raise ValueError(f"--grid takes KNOB=V1,V2,..., got {text!r}")
        if knob in varied:
            raise ValueError(f"--grid names {knob} twice; give all its values at once: {knob}=V1,V2,...")
        parts = values.split(";" if ";" in values else ",")
        varied[knob] = [read_knobs(choice.name, [f"{knob}={value}"])[knob] for value in parts]
    grid = Grid(choice.name, choice.knobs, varied)
    # A file's examples have lengths of their own, at which `run_grid` makes the methods.
    for setting, length in itertools.product(grid.choices(), settings.lengths if settings.generated else ()):
        setting.at(length, None, None, {})
    return grid


def run_grid(runner: Runner, grid: Grid) -> None:
    """Run every cell of the runner's settings under Full, then under the whole grid at once."""
    settings = runner.settings
    choices = grid.choices()
    # All methods are made before Full is run, which takes long.
    planned = [(cell, [runner.setting(choice, cell).method for choice in choices]) for cell in runner.cells]
    if kv_dtype := runner.model.kv_dtype:
        for method in itertools.chain.from_iterable(methods for _, methods in planned):
            check_quantisable(layer_methods(method, runner.model.config), kv_dtype)
    runner.run()
    for cell, methods in planned:
        encoded = runner.store[cell]
        runner.check(cell)
        question = resolve_question(methods[0], settings.question)
        names = [_label(grid, choice) for choice in choices]
        identities = [
            {"method": name, "knobs": knobs_of(method), "question": question, **cell.identity}
            for name, method in zip(names, methods, strict=True)
        ]
        missing = [i for i, identity in enumerate(identities) if runner.folder.find(identity) is None]
        if not missing:
            continue
        length = cell.length or max(map(len, encoded.wholes))
        rows = batch_rows(length * len(missing), settings.batch_tokens, len(encoded.wholes), runner.model.groups)
        answered = _answer(runner, encoded, [methods[i] for i in missing], question, rows)
        for index, (row, predictions) in zip(missing, answered, strict=True):
            about = {"budget": identities[index]["knobs"].get("budget"), "note": "one of a sweep"}
            runner.folder.add({**row, **identities[index], **about, **runner.placed}, identities[index], predictions)


def _label(grid: Grid, choice: Choice) -> str:
    return Choice(grid.name, {knob: choice.knobs[knob] for knob in grid.varied}).label


def _answer(
    runner: Runner, encoded: Encoded, methods: Sequence[Method], question: str, rows: int
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Answer a cell under every method; return the row and the predictions of each."""
    model, settings = runner.model, runner.settings
    texts = encoded.heads if question == "extend" else encoded.wholes
    length = encoded.cell.length or padded_length(max(map(len, texts)))
    limit = settings.max_new_tokens or max(example.max_new_tokens for example in encoded.examples)
    question_length = padded_length(max(map(len, encoded.tails)), 32)
    ids: list[list[list[int]]] = [[] for _ in methods]
    stats: list[list[tuple[int, kvjax.Stats]]] = [[] for _ in methods]
    starts = range(0, len(texts), rows)
    about = f"{encoded.cell.title}, {len(methods)} settings"
    if runner.progress and not is_drawn():
        say(f"{about}: compiling, reading and asking")
    bar = progress_bar(iterable=starts, unit="batch", desc=about, disable=not (runner.progress and is_drawn()))
    with CompileClock() as clock, Timer(clock) as timer:
        for start in bar:
            bar.set_postfix_str("compiling, reading and asking" if start == 0 else "reading and asking")
            real = min(rows, len(texts) - start)
            at = [start + (row if row < real else 0) for row in range(rows)]
            tokens, lengths = pad([texts[i] for i in at], length)
            questions, question_lengths = pad([encoded.tails[i] for i in at], question_length)
            results = kvjax.sweep(
                model.params,
                tokens,
                methods,
                config=model.config,
                max_new_tokens=limit,
                lengths=lengths,
                questions=questions if question == "extend" else None,
                question_lengths=question_lengths if question == "extend" else None,
                kv_dtype=model.kv_dtype,
            )
            for lane, result in enumerate(results):
                answers, counts, measured = jax.device_get((result.tokens, result.num_tokens, result.stats))
                ids[lane] += [answers[row, : counts[row]].tolist() for row in range(real)]
                stats[lane].append((real, measured))
    shared = {
        "seconds": round(timer.run / len(methods), 3),
        "compile_seconds": round(timer.compile / len(methods), 3),
        "settings_together": len(methods),
    }
    answered = []
    for lane in range(len(methods)):
        predictions = predict(model, encoded, ids[lane], settings.max_new_tokens)
        accounting = account(stats[lane], rows)
        row = {**summary(encoded, predictions), **accounting, "no_effect": reads_all(accounting), **shared}
        answered.append((row, predictions))
    return answered
