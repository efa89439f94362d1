"""Runs methods under `Watched` on the same prompts, and gathers the measurements."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.answering import (
    Calibration,
    LoadedModel,
    Setting,
    chess_thresholds,
    needs_thresholds,
    paper_method,
)
from experiments.benchmarks import Cell, Reading, encode_cell
from experiments.lab.insight.recall import Recall, Watched, readings
from experiments.lab.insight.settings import InsightSettings
from experiments.records import Results, knobs_of
from experiments.tasks import get_task
from models.hub.progress import progress_bar


def method_settings(
    settings: InsightSettings, model: LoadedModel, results: Results, knobs: Mapping[str, Mapping[str, Any]]
) -> list[Setting]:
    """Make the methods in the order of the settings; calibrate CHESS unless its knobs make that needless."""
    calibration = Calibration(
        (settings.task,), settings.length, settings.calibration_prompts, settings.calibration_new_tokens, settings.seed
    )
    made = []
    for name in settings.names:
        given = dict(knobs.get(name, {}))
        if needs_thresholds(name, given):
            given = {**chess_thresholds(model, calibration, results), **given}
        made.append(paper_method(name, settings.length, tokenizer=model.tokenizer, config=model.config, given=given))
    return made


def full_text(model: LoadedModel, tokens: Sequence[int], settings: InsightSettings) -> np.ndarray:
    """Generate Full's text after a prompt, past any EOS: int32 [new_tokens]."""
    new = settings.new_tokens
    cache = kvjax.prefill(model.params, [tokens], config=model.config, max_new_tokens=new, pad_multiple=settings.length)
    out = kvjax.generate(model.params, cache, max_new_tokens=new, eos_token_ids=())
    return np.asarray(out.tokens[0])


def watch(
    model: LoadedModel, tokens: Sequence[int], text: np.ndarray, method: Any, settings: InsightSettings, bar: Any
) -> tuple[Recall, np.ndarray]:
    """Run a prompt under a watched method.

    Args:
        model: the model.
        tokens: the prompt.
        text: int32 [N], Full's continuation.
        method: the method.
        settings: what to measure.
        bar: a progress bar, which advances at every step.

    Returns:
        The measurements, and the token that the method would have chosen at each step, int32 [N].
    """
    cache = kvjax.prefill(
        model.params,
        [tokens],
        config=model.config,
        method=Watched(method=method, top=settings.top, steps=settings.new_tokens),
        max_new_tokens=settings.new_tokens,
        pad_multiple=settings.length,
    )
    choices = []
    for given in text:
        choice = int(jnp.argmax(cache.logits[0]))
        choices.append(choice)
        fed = int(given) if settings.text == "full" else choice
        cache = kvjax.decode_step(model.params, cache, np.asarray([fed], np.int32))
        bar.update()
    return readings(cache), np.asarray(choices, np.int32)


def summary(
    recalls: Sequence[Recall],
    choices: Sequence[np.ndarray],
    texts: Sequence[np.ndarray],
    ends: Sequence[int],
    settings: InsightSettings,
) -> dict[str, Any]:
    """Average measurements into a metric for `experiments.records.make_record`: percent, means over samples.

    Args:
        recalls: the measurements of each sample.
        choices: the tokens that the method would have chosen, int32 [N] for each sample.
        texts: the text that Full generated, int32 [N] for each sample.
        ends: number of tokens of each of Full's answers, including the EOS.
        settings: what was measured.
    """

    def percent(values: np.ndarray, digits: int = 2) -> Any:
        return np.round(100 * np.asarray(values, np.float64), digits).tolist()

    mass, attended, best, own = (
        np.concatenate([vars(recall)[name] for recall in recalls], axis=1)
        for name in ("mass", "attended", "recall", "own")
    )
    answer = np.arange(settings.new_tokens)[None] < np.asarray(ends)[:, None]
    in_answer = mass.mean(axis=(0, 2))  # [samples, N]
    agreed = np.stack(choices) == np.stack(texts)
    return {
        "name": "mass_recall",
        "value": percent(mass.mean()),
        "unit": "percent",
        "in_answer": percent(in_answer[answer].mean()),
        "worst_head": percent(mass.mean(axis=(1, 3)).min()),
        "own_k": percent(own.mean()),
        "top_k": {str(k): percent(best[..., at].mean()) for at, k in enumerate(settings.top)},
        "attended_tokens": round(float(attended.mean()), 1),
        "agreement": percent(agreed.mean()),
        "agreement_in_answer": percent(agreed[answer].mean()),
        "mass_by_layer_head_step": percent(mass.mean(axis=1), 1),
        "own_k_by_layer_head": percent(own.mean(axis=(1, 3)), 1),
        "attended_by_layer_head": np.round(attended.mean(axis=(1, 3)), 1).tolist(),
        "top_k_by_layer_head": {
            str(k): percent(best[..., at].mean(axis=(1, 3)), 1) for at, k in enumerate(settings.top)
        },
        "top_k_by_step": {str(k): percent(best[..., at].mean(axis=(0, 1, 2)), 1) for at, k in enumerate(settings.top)},
    }


def run_methods(
    settings: InsightSettings, model: LoadedModel, results: Results, knobs: Mapping[str, Mapping[str, Any]]
) -> None:
    """Watch the methods that the results do not have yet.

    Args:
        settings: what to watch.
        model: the model.
        results: the record, which is read first and written after every method.
        knobs: knobs by method; they replace the papers' knobs.

    Raises:
        ValueError: prompts that would be longer than the model's position limit.
    """
    model.check_positions("--length", settings.length)
    todo = []
    for setting in method_settings(settings, model, results, knobs):
        identity = {"method": setting.name, "knobs": knobs_of(setting.method)}
        if results.find(identity) is None:
            todo.append((setting, identity))
    haystack = settings.haystack if get_task(settings.task).haystack else None
    cell = Cell(settings.task, settings.length, settings.samples, settings.seed, haystack)
    prompts = encode_cell(Reading(model.tokenizer_file), cell).wholes
    texts = [full_text(model, tokens, settings) for tokens in prompts] if todo else []
    ends = [answer_length(text, model.config.eos_token_ids) for text in texts]
    with progress_bar(total=len(todo) * settings.samples * settings.new_tokens, unit="step") as bar:
        for setting, identity in todo:
            bar.set_description(setting.name)
            begun = time.monotonic()
            watched = [
                watch(model, tokens, text, setting.method, settings, bar)
                for tokens, text in zip(prompts, texts, strict=True)
            ]
            recalls, choices = ([part[index] for part in watched] for index in (0, 1))
            metric = {
                **summary(recalls, choices, texts, ends, settings),
                **identity,
                "note": given_knobs(knobs.get(setting.name, {})) or setting.note,
                "prompt_tokens": [len(tokens) for tokens in prompts],
                "answer_tokens": ends,
                "seconds": round(time.monotonic() - begun, 1),
            }
            results.add(metric, {"method": setting.name})


def given_knobs(knobs: Mapping[str, Any]) -> str:
    """Format knobs as the command line takes them; the note of a method's setting does not name them."""
    return ", ".join(f"{name}={value}" for name, value in knobs.items())


def answer_length(text: np.ndarray, eos_token_ids: Sequence[int]) -> int:
    """Count the tokens up to and including the first EOS; count all tokens if the text has no EOS."""
    at = np.flatnonzero(np.isin(text, eos_token_ids))
    return int(at[0]) + 1 if len(at) else len(text)


def open_results(path: pathlib.Path, settings: InsightSettings, model: LoadedModel) -> Results:
    """Open the record at a path, with the values that all methods have in common."""
    about = {"model": model.name, "weights": model.weights, "dtype": model.config.dtype}
    return Results(path, "insight", {**settings.common, **about})
