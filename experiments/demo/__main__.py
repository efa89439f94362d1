"""`kvjax demo`: find needles in prose under each method.

Each context hides several needles at different depths. Full always runs first, as the reference. A demo is an evaluation
(`kvjax eval`) of a few contexts, with a table and a figure of its own. Every row says where its questions stand:

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
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from experiments.cli import Against, Job
from experiments.demo.report import draw, table
from experiments.demo.settings import DemoOutput, DemoSettings
from experiments.evaluation import Choice, Runner, read_predictions
from experiments.records import make_record, save, with_figures, write_bytes, write_record
from kvjax import registry


def run_demo(settings: DemoSettings, *, progress: bool = True) -> dict[str, Any]:
    """Run the demo; return its record: a metric for each method and budget, and all answers under "answers".

    Raises:
        ValueError: a length that is too short for a task or too long for the model.
    """
    begun, model = time.monotonic(), settings.load()
    asked = settings.evaluation(sum(leaf.size for leaf in jax.tree.leaves(model.params)), jax.default_backend())
    metrics, answers = [], []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(asked, model, pathlib.Path(folder), progress=progress)
        runner.run()
        for choice in asked.choices:
            rows = [row for row in runner.folder.rows if row["method"] == choice.label]
            lines = [line for row in rows for line in read_predictions(runner.folder.path, row)]
            answers.append(lines)
            metrics.append(_metric(choice, rows, lines, answers[0], settings))
    common = {**dataclasses.asdict(settings), **runner.folder.results.settings, "budgets": list(asked.budgets)}
    return {
        **make_record("demo", common, metrics),
        "wall_seconds": round(time.monotonic() - begun, 1),
        "compile_seconds": round(sum(metric["compile_seconds"] for metric in metrics), 1),
        "answers": [
            {"method": metric["method"], "budget": metric["budget"], "answers": lines}
            for metric, lines in zip(metrics, answers, strict=True)
        ],
    }


def _metric(
    choice: Choice,
    rows: Sequence[Mapping[str, Any]],
    lines: Sequence[Mapping],
    full: Sequence[Mapping],
    settings: DemoSettings,
) -> dict[str, Any]:
    """Summarise the rows of a method, one for each task, as a row of the demo's table."""

    def mean(name: str) -> float:
        return float(np.average([row[name] for row in rows], weights=[row["examples"] for row in rows]))

    accuracy, best = (100 * float(np.mean([line["score"] for line in part])) for part in (lines, full))
    same = [line["prediction"] == other["prediction"] for line, other in zip(lines, full, strict=True)]
    decoding, seconds = (sum(row[name] for row in rows) for name in ("answer_seconds", "seconds"))
    share = str(choice.knobs.get("budget", ""))  # the budget of a wrapper is in its label
    return {
        "name": "accuracy",
        "value": round(accuracy, 2),
        "unit": "percent",
        "method": choice.label if registry.inner_fields(registry.find(choice.name)) else choice.name,
        "budget": share,
        "budget_tokens": rows[0]["budget"] if share else None,
        "question": rows[0]["question"],
        "samples": len(lines),
        "percent_of_full": round(100 * accuracy / best, 1) if best else None,
        "agreement_percent": round(100 * float(np.mean(same)), 1),
        "attended_tokens": round(mean("attended_tokens"), 1),
        "length_tokens": round(mean("length_tokens"), 1),
        "kv_bytes_per_row": round(mean("resident_bytes_per_row")),
        "bytes_read_per_step_per_row": round(mean("bytes_read_per_step")),
        "tokens_per_second": round(sum(line["answer_tokens"] for line in lines) / max(decoding, 1e-9), 1),
        "read_seconds_per_context": round((seconds - decoding) / settings.samples / len(settings.tasks), 3),
        "compile_seconds": round(sum(row["compile_seconds"] for row in rows), 2),
        # Full has no effect by definition. For any other method no effect means that the comparison says nothing.
        "no_effect": choice.name != "full" and all(row["no_effect"] for row in rows),
    }


def write(result: dict[str, Any], files: Sequence[pathlib.Path]) -> None:
    """Write the record and, if there is a second file, the figure; each file is complete or not there."""
    image = save(draw(result), "png") if len(files) > 1 else None  # before any file exists, so that errors leave none
    write_record(files[0], result)
    if image is not None:
        write_bytes(files[1], image)


def _demo(settings: DemoSettings, output: DemoOutput, against: Against) -> None:
    output = with_figures(output)
    result = run_demo(settings, progress=not output.quiet)
    if not output.json:
        print(table(result), flush=True)  # before anything is written, so that a full disk does not lose the result
    write(result, output.files)
    written = [str(path) for path in output.files]
    if output.json:
        print(json.dumps({"files": written, "rows": result["metrics"]}))
    else:
        against.show(output.files[0], output.out.name)
    if not output.quiet:
        print("written: " + ", ".join(written), file=sys.stderr)


main = Job(_demo, DemoSettings, DemoOutput, Against, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
