"""Tasks of EleutherAI's lm-evaluation-harness: ``lm-eval:gsm8k``, or ``lm-eval:gsm8k=test.jsonl`` with a file of one's own.

The harness makes the prompt and scores the answer, so any of its tasks that generate text can be evaluated like a suite's
file. A file of one's own has the records of the task's dataset, a JSON object in each line. It has no examples to show, so a
task that draws examples from its dataset shows none; a task that brings its examples shows them.

The score is the share of the instructions that are followed (IFEval), what math-verify says (minerva_math), or else the
task's first metric under its last filter; all metrics are further measures. Three things differ from the harness:

* A countdown of LongProc counts as wrong if its solution is not made of equations. The harness hands the text to ``eval``.
* Tasks that run what a model writes are refused.
* 025 is 25 in AIME, whose answers have three digits. The harness calls them two answers.

MATH-500 is best read as ``minerva_math500``: hendrycks_math500 knows no box and finds every answer in one wrong.
"""

import functools
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.records import read_records
from experiments.tasks import Example

_RESPONSE = "One. Two [a] *b*\n\n* c\n\nP.S. d"  # is scored once on reading: no run may end after its answers
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


def _load(name: str, records: Sequence[Mapping[str, Any]]) -> Any:
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


def read_harness(path: Path, limit: int | None = None) -> list[Example]:
    """Read a task of the harness.

    Args:
        path: ``TASK``, or ``TASK=FILE``.

    Raises:
        ValueError: an unknown task, one that generates no text or runs code, or a file whose records the task cannot read.
        ModuleNotFoundError: the harness is not installed.
    """
    name, _, file = str(path).partition("=")
    records = read_records(Path(file), limit) if file else []
    try:
        task = _load(name, [record.values for record in records])
        docs = list(task.test_docs() if task.has_test_docs() else task.validation_docs())[:limit]
    except (ValueError, ModuleNotFoundError, OSError):
        raise
    except Exception as error:  # of any kind: a task takes its records as they are
        raise ValueError(f"{path}: expected records of the dataset of {name}, got {error!r}") from error
    options = dict(task.config.generation_kwargs)
    stop, examples = options.get("until") or (), []
    for number, doc in enumerate(docs, 1):
        try:
            text = task.fewshot_context(doc, task.config.num_fewshot or 0)
            context, gap, question = text.rpartition("\n")
            example = Example(
                task=name,
                context=context or text,
                question=gap + question if context else "",
                answer_prefix="",
                answers=(json.dumps(doc, sort_keys=True),),
                max_new_tokens=int(options.get("max_gen_toks", 256)),
                scorer="lm-eval",
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
            )
            results(_RESPONSE, example)
        except Exception as error:
            raise ValueError(f"{path}, record {number}: expected a record of {name}, got {error!r}") from error
        examples.append(example)
    return examples
