"""Where does a method lose attention? `python -m experiments.insight --methods quest,snapkv --out docs/records/insight`.

Every method answers the same prompts while `experiments.insight.recall.Watched` compares, in each layer, KV head and decode
step, what it attends to with exact attention of its own queries and keys: the share of attention mass that is covered, and
the share of the k best tokens that are among the chosen.

``text="full"`` feeds every method the text that Full generates, so that methods are compared at the same tokens;
``text="own"`` lets each go its own way. Generation does not stop at the end of an answer; steps up to Full's EOS are
averaged apart. Prompts are run one at a time. Methods run at the budgets of `experiments.answering.presets`, the question is
part of the prompt. The record is written after every method, and a method that it already has is skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kvjax
from experiments.answering.__main__ import parse_knobs
from experiments.answering.cell import LoadedModel, load_model
from experiments.answering.presets import (
    METHODS,
    Calibration,
    Setting,
    chess_thresholds,
    needs_thresholds,
    paper_method,
    read_settings,
)
from experiments.answering.prompts import Cell, make_prompts
from experiments.demo import report as demo_report
from experiments.evaluation.plots import save
from experiments.insight import plots as insight_plots
from experiments.insight.recall import Recall, Watched, readings
from experiments.records import record
from experiments.records.resumable import Results, knobs_of
from experiments.tasks import get_task

TEXTS = ("full", "own")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to watch; see `python -m experiments.insight --help`.

    Raises:
        ValueError: an unknown task, method or text, or a number below 1.
    """

    methods: tuple[str, ...]
    task: str = "niah_single_2"
    length: int = 2048
    new_tokens: int = 64
    samples: int = 2
    top: tuple[int, ...] = (16, 64, 256)
    text: str = "full"
    seed: int = 0
    haystack: str | None = None
    calibration_prompts: int = 4
    calibration_new_tokens: int = 128

    def __post_init__(self) -> None:
        get_task(self.task)
        numbers = ("length", "new_tokens", "samples", "calibration_prompts", "calibration_new_tokens")
        for name, value in [*((name, vars(self)[name]) for name in numbers), *(("top", k) for k in self.top)]:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.text not in TEXTS:
            raise ValueError(f"text must be one of {TEXTS}, got {self.text!r}")
        read_settings([f"{name}." for name in self.methods], lambda name, texts: {})


def method_settings(
    plan: Plan, model: LoadedModel, results: Results, knobs: Mapping[str, Mapping[str, Any]]
) -> list[Setting]:
    """The methods of a plan in its order; CHESS is calibrated unless its knobs say otherwise."""
    calibration = Calibration(
        (plan.task,), plan.length, plan.calibration_prompts, plan.calibration_new_tokens, plan.seed
    )
    made = []
    for name in dict.fromkeys(name.lower() for name in plan.methods):
        given = dict(knobs.get(name, {}))
        if needs_thresholds(name, given):
            given = {**chess_thresholds(model, calibration, results), **given}
        made.append(paper_method(name, plan.length, tokenizer=model.tokenizer, config=model.config, given=given))
    return made


def full_text(model: LoadedModel, tokens: Sequence[int], plan: Plan) -> np.ndarray:
    """What Full says after a prompt, EOS or not: int32 [new_tokens]."""
    cache = kvjax.prefill(
        model.params, [tokens], config=model.config, max_new_tokens=plan.new_tokens, pad_multiple=plan.length
    )
    out = kvjax.generate(model.params, cache, max_new_tokens=plan.new_tokens, eos_token_ids=())
    return np.asarray(out.tokens[0])


def watch(
    model: LoadedModel, tokens: Sequence[int], text: np.ndarray, method: Any, plan: Plan, bar: Any
) -> tuple[Recall, np.ndarray]:
    """One prompt under a watched method.

    Args:
        model: the model.
        tokens: the prompt.
        text: int32 [N], Full's continuation.
        method: kvjax method.
        plan: what to measure.
        bar: told of every step.

    Returns:
        The measurements, and the token the method would have said at each step, int32 [N].
    """
    cache = kvjax.prefill(
        model.params,
        [tokens],
        config=model.config,
        method=Watched(method=method, top=plan.top, steps=plan.new_tokens),
        max_new_tokens=plan.new_tokens,
        pad_multiple=plan.length,
    )
    said = []
    for given in text:
        token = int(jnp.argmax(cache.logits[0]))
        said.append(token)
        fed = int(given) if plan.text == "full" else token
        cache = kvjax.decode_step(model.params, cache, np.asarray([fed], np.int32))
        bar.update()
    return readings(cache), np.asarray(said, np.int32)


def summary(
    found: Sequence[Recall], said: Sequence[np.ndarray], texts: Sequence[np.ndarray], ends: Sequence[int], plan: Plan
) -> dict[str, Any]:
    """A metric for `experiments.records.record`: percent, means over samples.

    Args:
        found: the measurements of each sample.
        said: what the method would have said, int32 [N] each.
        texts: what Full said, int32 [N] each.
        ends: tokens of Full's answers, EOS included.
        plan: what was measured.
    """

    def percent(values: np.ndarray, digits: int = 2) -> Any:
        return np.round(100 * np.asarray(values, np.float64), digits).tolist()

    mass, attended, best, own = (
        np.concatenate([vars(one)[name] for one in found], axis=1) for name in ("mass", "attended", "recall", "own")
    )
    answer = np.arange(plan.new_tokens)[None] < np.asarray(ends)[:, None]
    in_answer = mass.mean(axis=(0, 2))  # [samples, N]
    agreed = np.stack(said) == np.stack(texts)
    return {
        "name": "mass_recall",
        "value": percent(mass.mean()),
        "unit": "percent",
        "in_answer": percent(in_answer[answer].mean()),
        "worst_head": percent(mass.mean(axis=(1, 3)).min()),
        "own_k": percent(own.mean()),
        "top_k": {str(k): percent(best[..., at].mean()) for at, k in enumerate(plan.top)},
        "attended_tokens": round(float(attended.mean()), 1),
        "agreement": percent(agreed.mean()),
        "agreement_in_answer": percent(agreed[answer].mean()),
        "mass_by_layer_head_step": percent(mass.mean(axis=1), 1),
        "own_k_by_layer_head": percent(own.mean(axis=(1, 3)), 1),
        "attended_by_layer_head": np.round(attended.mean(axis=(1, 3)), 1).tolist(),
        "top_k_by_layer_head": {str(k): percent(best[..., at].mean(axis=(1, 3)), 1) for at, k in enumerate(plan.top)},
        "top_k_by_step": {str(k): percent(best[..., at].mean(axis=(0, 1, 2)), 1) for at, k in enumerate(plan.top)},
    }


def run(plan: Plan, model: LoadedModel, results: Results, knobs: Mapping[str, Mapping[str, Any]]) -> None:
    """Watches the methods that the results do not have yet.

    Args:
        plan: what to watch.
        model: the model.
        results: read, and written after every method.
        knobs: by method, before the papers'.
    """
    todo = []
    for setting in method_settings(plan, model, results, knobs):
        identity = {"method": setting.name, "knobs": knobs_of(setting.method)}
        if results.find(identity) is None:
            todo.append((setting, identity))
    haystack = plan.haystack if get_task(plan.task).haystack else None
    prompts = make_prompts(model.tokenizer_file, Cell(plan.task, plan.length, plan.samples, plan.seed, haystack))
    texts = [full_text(model, tokens, plan) for tokens in prompts.tokens] if todo else []
    ends = [answer_length(text, model.config.eos_token_ids) for text in texts]
    with tqdm(total=len(todo) * plan.samples * plan.new_tokens, unit="step") as bar:
        for setting, identity in todo:
            bar.set_description(setting.name)
            begun = time.monotonic()
            done = [
                watch(model, tokens, text, setting.method, plan, bar)
                for tokens, text in zip(prompts.tokens, texts, strict=True)
            ]
            metric = {
                **summary([recall for recall, _ in done], [said for _, said in done], texts, ends, plan),
                **identity,
                "note": given_knobs(knobs.get(setting.name, {})) or setting.note,
                "prompt_tokens": [len(tokens) for tokens in prompts.tokens],
                "answer_tokens": ends,
                "seconds": round(time.monotonic() - begun, 1),
            }
            results.add(metric, {"method": setting.name})


def given_knobs(knobs: Mapping[str, Any]) -> str:
    """Knobs as the command line takes them; the note of a method's setting does not know of them."""
    return ", ".join(f"{name}={value}" for name, value in knobs.items())


def answer_length(text: np.ndarray, eos_token_ids: Sequence[int]) -> int:
    """Tokens up to the first EOS, that included; all of them if there is none."""
    at = np.flatnonzero(np.isin(text, eos_token_ids))
    return int(at[0]) + 1 if len(at) else len(text)


def open_results(path: pathlib.Path, plan: Plan, model: LoadedModel) -> Results:
    """The record, with what all methods have in common."""
    settings = dataclasses.asdict(plan)
    for name in ("methods", "calibration_prompts", "calibration_new_tokens"):
        del settings[name]
    settings["top"] = list(plan.top)
    return Results(path, "insight", {**settings, "model": model.name, "dtype": model.config.dtype})


def main() -> None:
    """Command line."""
    fields = {field.name: field.default for field in dataclasses.fields(Plan)}
    parser = argparse.ArgumentParser(description="Recall of methods' selections against exact attention.")
    parser.add_argument("--model", default="builtin", help="Hugging Face directory, or 'builtin'")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    parser.add_argument("--methods", default="all", help="comma-separated names, or 'all'")
    parser.add_argument(
        "--set", action="append", default=[], metavar="METHOD.KNOB=VALUE", help="a knob of a method; repeatable"
    )
    parser.add_argument("--task", default=fields["task"], help="task of the prompts")
    parser.add_argument("--haystack", help="'noise', 'prose' or file:PATH (default: the task's own)")
    parser.add_argument("--length", type=int, default=fields["length"], help="tokens of prompt and answer")
    parser.add_argument("--new-tokens", type=int, default=fields["new_tokens"], help="decode steps")
    parser.add_argument("--samples", type=int, default=fields["samples"], help="prompts")
    parser.add_argument("--seed", type=int, default=fields["seed"], help="seed of the samples")
    parser.add_argument("--top", default=",".join(map(str, fields["top"])), help="values of k, comma-separated")
    parser.add_argument(
        "--text", choices=TEXTS, default=fields["text"], help="feed Full's text, or what the method says itself"
    )
    parser.add_argument("--calibration-prompts", type=int, default=fields["calibration_prompts"], help="for CHESS")
    parser.add_argument(
        "--calibration-new-tokens", type=int, default=fields["calibration_new_tokens"], help="for CHESS, each prompt"
    )
    parser.add_argument("--no-plot", action="store_true", help="write no PNG (needs no matplotlib)")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="OUT.json and OUT.png are written")
    arguments = vars(parser.parse_args())
    if not arguments["no_plot"]:
        demo_report.check_installed()
    given = {name: arguments[name] for name in fields}
    names = METHODS if given["methods"] == "all" else tuple(given["methods"].split(","))
    plan = Plan(**{**given, "methods": names, "top": tuple(int(k) for k in given["top"].split(","))})
    knobs = read_settings(arguments["set"], parse_knobs)
    model = load_model(arguments["model"], arguments["dtype"])
    path = arguments["out"].with_suffix(".json")
    run(plan, model, open_results(path, plan, model), knobs)
    made = json.loads(path.read_text(encoding="utf-8"))
    if not arguments["no_plot"]:
        record.write_bytes(path.with_suffix(".png"), save(insight_plots.draw(made), "png"))
    print(insight_plots.table(made))


if __name__ == "__main__":
    main()
