"""Runs methods under `Watched` on the same prompts, and gathers the measurements, as the settings say."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jsonargparse.typing import PositiveInt

import kvjax
from experiments import answering
from experiments.benchmarks import Cell, Reading, encode_cell
from experiments.cli import option
from experiments.lab.insight.recall import Recall, Watched, readings
from experiments.records import Results, knobs_of
from experiments.tasks import get_task
from kvjax import registry
from models.hub.progress import progress_bar


@dataclasses.dataclass(frozen=True)
class InsightSettings(answering.ModelSettings):
    """The settings of `experiments.lab.insight`.

    Attributes:
        methods: comma-separated names, package.module:Class, wrappers such as twilight(quest), or 'all'
        knobs: a knob of a method; repeatable
        task: task of the prompts
        haystack: 'noise', 'prose', 'code' or file:PATH (default: the task's own)
        length: tokens of prompt and answer
        new_tokens: decode steps
        samples: prompts
        seed: seed of the samples
        top: values of k, comma-separated
        text: feed Full's text, or the text that the method itself generates

    Raises:
        ValueError: an unknown task, method or knob.
    """

    methods: tuple[str, ...] = ("all",)
    knobs: tuple[str, ...] = option((), flag="set", repeat=True, metavar="METHOD.KNOB=VALUE")
    task: str = "niah_single_2"
    haystack: str | None = None
    length: PositiveInt = 2048
    new_tokens: PositiveInt = 64
    samples: PositiveInt = 2
    seed: int = 0
    top: tuple[PositiveInt, ...] = (16, 64, 256)
    text: str = option("full", choices=("full", "own"))

    def __post_init__(self) -> None:
        get_task(self.task)
        for name in self.names:
            registry.find(name)  # refuses unknown names

    @property
    def names(self) -> tuple[str, ...]:
        """The methods' names."""
        methods = answering.METHODS if self.methods == ("all",) else self.methods
        return tuple(dict.fromkeys(map(registry.canonical_name, methods)))

    @property
    def common(self) -> dict[str, object]:
        """The values that all methods of a record have in common; JSON values."""
        fields = ("task", "length", "new_tokens", "samples", "text", "seed", "haystack")
        return {name: vars(self)[name] for name in fields} | {"top": list(self.top)}


def method_settings(settings: InsightSettings, model: answering.LoadedModel, results: Results) -> list[answering.Setting]:
    """Make the methods in the order of the settings; calibrate CHESS unless its knobs make that needless."""
    prompts, tokens = 4, 128
    calibration = answering.Calibration((settings.task,), settings.length, prompts, tokens, settings.seed)
    knobs, methods = answering.knobs_by_method(settings.knobs), []
    for name in settings.names:
        chosen = dict(knobs.get(name, {}))
        note = ", ".join(f"{knob}={value}" for knob, value in chosen.items())  # as the command line takes them
        if answering.needs_thresholds(name, chosen):
            chosen = {**answering.chess_thresholds(model, calibration, results), **chosen}
        setting = answering.paper_method(name, settings.length, tokenizer=model.tokenizer, config=model.config, given=chosen)
        methods.append(dataclasses.replace(setting, note=note or setting.note))
    return methods


def full_text(model: answering.LoadedModel, tokens: Sequence[int], settings: InsightSettings) -> np.ndarray:
    """Generate Full's text after a prompt, past any EOS: int32 [new_tokens]."""
    new = settings.new_tokens
    cache = kvjax.prefill(model.params, [tokens], config=model.config, max_new_tokens=new, pad_multiple=settings.length)
    out = kvjax.generate(model.params, cache, max_new_tokens=new, eos_token_ids=())
    return np.asarray(out.tokens[0])


def watch(
    model: answering.LoadedModel, tokens: Sequence[int], text: np.ndarray, method: Any, settings: InsightSettings, bar: Any
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
    for token in text:
        choice = int(jnp.argmax(cache.logits[0]))
        choices.append(choice)
        fed = int(token) if settings.text == "full" else choice
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
        np.concatenate([vars(recall)[name] for recall in recalls], axis=1) for name in ("mass", "attended", "recall", "own")
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
    }


def run_methods(settings: InsightSettings, model: answering.LoadedModel, results: Results) -> None:
    """Watch the methods that the results do not have yet.

    Args:
        settings: what to watch.
        model: the model.
        results: the record, which is read first and written after every method.

    Raises:
        ValueError: prompts that would be longer than the model's position limit.
    """
    model.check_positions("--length", settings.length)
    jobs = []
    for setting in method_settings(settings, model, results):
        identity = {"method": setting.name, "knobs": knobs_of(setting.method)}
        if results.find(identity) is None:
            jobs.append((setting, identity))
    haystack = settings.haystack if get_task(settings.task).haystack else None
    cell = Cell(settings.task, settings.length, settings.samples, settings.seed, haystack)
    prompts = encode_cell(Reading(model.tokenizer_file), cell).wholes
    texts = [full_text(model, tokens, settings) for tokens in prompts] if jobs else []
    ends = [answer_length(text, model.config.eos_token_ids) for text in texts]
    with progress_bar(total=len(jobs) * settings.samples * settings.new_tokens, unit="step") as bar:
        for setting, identity in jobs:
            bar.set_description(setting.name)
            begun = time.monotonic()
            watched = [
                watch(model, tokens, text, setting.method, settings, bar) for tokens, text in zip(prompts, texts, strict=True)
            ]
            recalls, choices = ([part[index] for part in watched] for index in (0, 1))
            metric = {
                **summary(recalls, choices, texts, ends, settings),
                **identity,
                "note": setting.note,
                "prompt_tokens": [len(tokens) for tokens in prompts],
                "answer_tokens": ends,
                "seconds": round(time.monotonic() - begun, 1),
            }
            results.add(metric, {"method": setting.name})


def answer_length(text: np.ndarray, eos_token_ids: Sequence[int]) -> int:
    """Count the tokens up to and including the first EOS; count all tokens if the text has no EOS."""
    at = np.flatnonzero(np.isin(text, eos_token_ids))
    return int(at[0]) + 1 if len(at) else len(text)
