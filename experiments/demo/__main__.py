"""`kvjax demo`: find needles in prose under each method.

Each context hides several needles at different depths. Full always runs first, as the reference. A demo is an evaluation
(`kvjax eval`, whose flags it has) of a few contexts, with a table and a figure of its own. Every row says where its questions
stand:

* extend: the context is prefilled once under the method, and each question is asked of a copy of the compressed cache. So the
  method compresses without knowing the question.
* prefill: the question ends the prompt, and every question has a prompt of its own. So the method compresses with the
  question in sight.

auto (the default) is prefill for methods that choose tokens by the attention of the prompt's last queries, and extend for all
other methods. SnapKV and SentenceKV choose by the last queries: in their papers the prompt ends with the question, and
without it their votes say nothing about the answer.

Times leave compilation out. Tokens per second count all answers of a method. Bytes are per question.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jsonargparse.typing import PositiveInt

from experiments.answering import QUESTIONS, Choice, at_budgets, choices_of, written
from experiments.cli import Job, option, output_folder
from experiments.demo.report import draw, table
from experiments.evaluation import Compared, EvaluationSettings, Runner, Shown, beside_reference, load, read_predictions
from experiments.records import make_record, save, with_figures, write_bytes, write_record
from kvjax import registry

_METHODS = tuple(Choice(name, {}) for name in ("streamingllm", "snapkv", "h2o", "keydiff", "quest"))
_SLOW_PARAMETERS = 50_000_000  # a CPU takes minutes for larger models, most of the time to compile


def _uncalibrated(entries: Any) -> tuple[Choice, ...]:
    """Parse methods; CHESS gets the trigger that needs no calibration, which would take longer than a demo."""
    fixed = {"trigger": "fixed"}
    return tuple(Choice("chess", {**x.knobs, **fixed}) if x.name == "chess" else x for x in choices_of(entries))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSettings(EvaluationSettings):
    """The settings of a demo.

    Attributes:
        lengths: tokens of context, questions and answers; one number
        budgets: comma-separated shares of the length or numbers of tokens (default: 1/8,1/4; on a CPU 1/4 alone for models
            of more than 50M parameters, which take half a minute for each method and budget)
        methods: comma-separated names, package.module:Class, or wrappers such as twilight(quest); Full is always run first

    Raises:
        ValueError: several lengths, or an error of `EvaluationSettings` or of a method at this length.
    """

    tasks: tuple[str, ...] = ("niah_single_2",)
    lengths: tuple[PositiveInt, ...] = option((2048,), flag="length")
    samples: PositiveInt = 2
    questions: PositiveInt = 5
    haystack: tuple[str, ...] = ("prose",)
    question: str = option("auto", choices=QUESTIONS)
    workers: int = 0
    methods: tuple[Choice, ...] = option(_METHODS, read=_uncalibrated, write=written)
    budgets: tuple[str, ...] = option((), flag="budget")

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.lengths) != 1 or self.files:
            raise ValueError(f"a demo has one length and generated tasks, got {self.lengths} and {', '.join(self.tasks)}")
        for choice in at_budgets(self.methods, self.budgets or ("1/8", "1/4")):  # before a model is loaded
            choice.at(self.lengths[0], None, None)

    def with_budgets(self, parameters: int = 0, platform: str = "") -> DemoSettings:
        """Fill in budgets that are not given by those that suit a model of some ``parameters`` on JAX's ``platform``."""
        slow = platform == "cpu" and parameters > _SLOW_PARAMETERS
        return self if self.budgets else dataclasses.replace(self, budgets=("1/4",) if slow else ("1/8", "1/4"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOutput(Shown):
    """The output of a demo.

    Attributes:
        out: directory for demo.json and demo.png
    """

    out: pathlib.Path = option(pathlib.Path("runs/demo"), read=output_folder)


def run_demo(settings: DemoSettings, *, progress: bool = True) -> dict[str, Any]:
    """Run the demo; return its record: a metric for each method and budget, and all answers under "answers".

    Raises:
        ValueError: a length that is too short for a task or too long for the model.
    """
    begun, model = time.monotonic(), settings.load()
    asked = settings.with_budgets(sum(leaf.size for leaf in jax.tree.leaves(model.params)), jax.default_backend())
    metrics, answers = [], []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(asked, model, pathlib.Path(folder), progress=progress)
        runner.run()
        compared = beside_reference(load([runner.folder.path]))
        for choice in asked.choices:
            mine = [item for item in compared if item.row["method"] == choice.label]
            lines = [line for item in mine for line in read_predictions(runner.folder.path, item.row)]
            metrics.append(_metric(choice, mine, settings.samples))
            answers.append({name: metrics[-1][name] for name in ("method", "budget")} | {"answers": lines})
    best = metrics[0]["value"]
    for metric in metrics:
        metric["percent_of_full"] = round(100 * metric["value"] / best, 1) if best else None
    common = {**asked.as_dict(), **runner.folder.results.settings, "length": asked.lengths[0]}
    return {
        **make_record("demo", common, metrics),
        "wall_seconds": round(time.monotonic() - begun, 1),
        "compile_seconds": round(sum(metric["compile_seconds"] for metric in metrics), 1),
        "answers": answers,
    }


def _metric(choice: Choice, compared: Sequence[Compared], samples: int) -> dict[str, Any]:
    """Summarise the rows of a method, one for each task, as a row of the demo's table."""
    rows = [item.row for item in compared]
    examples = [row["examples"] for row in rows]
    decoding, seconds = (sum(row[name] for row in rows) for name in ("answer_seconds", "seconds"))

    def mean(values: Sequence[float], digits: int = 1) -> float:
        return round(float(np.average(values, weights=examples)), digits)

    def mean_of(name: str, digits: int = 1) -> float:
        return mean([row[name] for row in rows], digits)

    share = str(choice.knobs.get("budget", ""))  # the budget of a wrapper is in its label
    return {
        "name": "accuracy",
        "value": mean_of("value", 2),
        "unit": "percent",
        "method": choice.label if registry.inner_fields(registry.find(choice.name)) else choice.name,
        "budget": share,
        "budget_tokens": rows[0]["budget"] if share else None,
        "question": rows[0]["question"],
        "samples": sum(examples),
        "agreement_percent": mean([item.same for item in compared]),
        "attended_tokens": mean_of("attended_tokens"),
        "length_tokens": mean_of("length_tokens"),
        "kv_bytes_per_row": round(mean_of("resident_bytes_per_row")),
        "bytes_read_per_step_per_row": round(mean_of("bytes_read_per_step")),
        "tokens_per_second": round(sum(row["mean_answer_tokens"] * row["examples"] for row in rows) / max(decoding, 1e-9), 1),
        "read_seconds_per_context": round((seconds - decoding) / samples / len(rows), 3),
        "compile_seconds": round(sum(row["compile_seconds"] for row in rows), 2),
        # Full has no effect by definition. For any other method no effect means that the comparison says nothing.
        "no_effect": choice.name != "full" and all(row["no_effect"] for row in rows),
    }


def _demo(settings: DemoSettings, output: DemoOutput) -> None:
    output = with_figures(output)
    result = run_demo(settings, progress=not output.quiet)
    if not output.json:
        print(table(result), flush=True)  # before anything is written, so that a full disk does not lose the result
    image = save(draw(result), "png") if output.plot else None  # before any file exists, so that errors leave none
    files = [output.out / "demo.json", output.out / "demo.png"][: 1 + output.plot]
    write_record(files[0], result)
    if image is not None:
        write_bytes(files[1], image)
    if output.json:
        print(json.dumps({"files": [str(path) for path in files], "rows": result["metrics"]}))
    if not output.quiet:
        print(f"written: {', '.join(map(str, files))}", file=sys.stderr)


main = Job(_demo, DemoSettings, DemoOutput, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
