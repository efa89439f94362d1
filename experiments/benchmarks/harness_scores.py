"""Loads tasks of EleutherAI's lm-evaluation-harness, and scores answers by their metrics; `harness_file` says how."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.benchmarks.base import Example

_COUNTDOWN = "longproc_countdown"
_EQUATION = re.compile(r"\s*\d{1,9}\s*(?:[+*-]|/(?!\s*0+\s*=))\s*\d{1,9}\s*=\s*-?\d{1,9}\s*")
_SOLUTION = re.compile(r"<Solution>(.*?)</Solution>", re.DOTALL)
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_SCORES = ("inst_level_strict_acc", "math_verify")  # the metrics that are no task's first and are the score nevertheless
_LOADED: dict[str, Any] = {}  # the tasks that were read, by name


@functools.cache
def _manager() -> Any:
    try:
        return importlib.import_module("lm_eval.tasks").TaskManager()
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the reader 'lm-eval' needs the harness ({error}); install the extra 'lm-eval' (pip install 'kvjax[lm-eval]')"
        ) from error


def load(name: str, records: Sequence[Mapping[str, Any]]) -> Any:
    """Load a task that writes text, on records of a file if there are any."""
    manager = _manager()
    if name not in manager.all_subtasks:
        raise ValueError(f"expected a task of the harness, as `lm-eval ls tasks` lists them, got {name!r}")
    if records:
        config = importlib.import_module("lm_eval.tasks._yaml_loader").load_yaml(manager.task_index[name].yaml_path)
        config |= dict.fromkeys(("training_split", "validation_split", "fewshot_split", "tag"))
        datasets = importlib.import_module("datasets")
        datasets.disable_progress_bars()
        rows = datasets.Dataset.from_list(list(map(dict, records)))
        if not (config.get("fewshot_config") or {}).get("samples"):
            config["num_fewshot"] = 0
        config |= {"test_split": "test", "custom_dataset": lambda **_: {"test": rows}, "metadata": {}}
        task = importlib.import_module("lm_eval.api.task").ConfigurableTask(config=config)
    else:
        (task,) = manager.load([name])["tasks"].values()
    if task.OUTPUT_TYPE != "generate_until":
        raise ValueError(
            f"expected a task that generates text, got {name!r} of {task.OUTPUT_TYPE}; "
            "`python -m experiments.lm_eval` runs it"
        )
    if task.config.unsafe_code and (not name.startswith("longproc_") or "pseudo_to_code" in name):
        raise ValueError(f"expected a task that does not run what a model writes, got {name!r}")
    _LOADED[name] = task
    return task


def results(prediction: str, example: Example) -> Mapping[str, float]:
    """Score an answer by every metric of its task, each in [0, 1]; a name has the metric's filter if there are several."""
    if example.task not in _LOADED:
        raise ValueError(f"expected a task that was read in this process, got {example.task!r}")
    task, reference = _LOADED[example.task], example.answers[0]
    if example.task.startswith(_COUNTDOWN):
        prediction = _only_equations(prediction)
    elif example.task.startswith("aime"):
        prediction, reference = (_LEADING_ZEROS.sub("", text) for text in (prediction, reference))
    doc = json.loads(reference)
    instance = importlib.import_module("lm_eval.api.instance").Instance("generate_until", doc, ("", {}), 0)
    instance.resps = [prediction]
    scores = {}
    for ensemble in task._filters:
        ensemble.apply([instance])
        texts = instance.filtered_resps[ensemble.name]
        values = task.process_results(doc, texts if isinstance(texts, list) else [texts])
        suffix = f",{ensemble.name}" if len(task._filters) > 1 else ""
        scores |= {f"{metric}{suffix}": float(np.mean(value)) for metric, value in values.items()}
    return scores


def score(prediction: str, example: Example) -> float:
    """Score an answer by the metric that the module's docstring names."""
    scores = results(prediction, example)
    last = [name for name in scores if name.partition(",")[2] == next(reversed(scores)).partition(",")[2]]
    return scores[next((name for name in last if name.partition(",")[0] in _SCORES), last[0])]


def _only_equations(prediction: str) -> str:
    """Empty a solution that holds anything but equations of whole numbers."""
    solution = _SOLUTION.search(prediction)
    if solution is None or all(map(_EQUATION.fullmatch, solution[1].strip().split("\n"))):
        return prediction
    return prediction.replace(solution[0], "<Solution></Solution>")
