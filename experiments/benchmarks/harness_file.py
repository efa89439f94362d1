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

from __future__ import annotations

import json
from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.harness_scores import load, results
from experiments.benchmarks.records import read_jsonl

_RESPONSE = "One. Two [a] *b*\n\n* c\n\nP.S. d"  # is scored once on reading: no run may end after its answers


def read_harness(path: Path, limit: int | None = None) -> list[Example]:
    """Read a task of the harness.

    Args:
        path: ``TASK``, or ``TASK=FILE``.

    Raises:
        ValueError: an unknown task, one that generates no text or runs code, or a file whose records the task cannot read.
        ModuleNotFoundError: the harness is not installed.
    """
    name, _, file = str(path).partition("=")
    records = read_jsonl(Path(file), limit) if file else []
    try:
        task = load(name, [record.values for record in records])
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
