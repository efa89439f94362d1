"""LongBench v1 and LongBench-E (Bai et al. 2023, arXiv:2308.14508): a jsonl file for each dataset.

Templates and generation lengths are the benchmark's own (`longbench_v1.json`), where the datasets are listed for which its
predictor uses no chat template, too: few-shot prompts and code. The whole template belongs to the user's turn of a chat, so
the question is the text after `{context}`, and the answer prefix is empty.
"""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

from experiments.benchmarks.base import Example, check_name
from experiments.benchmarks.records import Record, read_examples

_FILE = importlib.resources.files("experiments.benchmarks") / "longbench_v1.json"
_SPECIFICATION: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
SCORER_OF: dict[str, str] = _SPECIFICATION["scorers"]


def length_bucket(length: float) -> str:
    """Return LongBench-E's bucket of a record's `length` (in words, or in characters of Chinese)."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def read_longbench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of LongBench or LongBench-E; the names of LongBench-E's files and tasks end in `_e`.

    Args:
        path: the file. Records have `input, context, answers, length, dataset, all_classes`; without
            `dataset` the file's name is the dataset.

    Raises:
        ValueError: the file or the dataset does not exist, or a line lacks LongBench's form; the message names the file, the
            line, what was found and what was expected.
    """

    def example(record: Record) -> Example:
        dataset = (record.text("dataset") if record.has("dataset") else path.stem).removesuffix("_e")
        with record.named():
            check_name("LongBench dataset", dataset, SCORER_OF)
        before, after = _SPECIFICATION["templates"][dataset].split("{context}")
        return Example(
            task=dataset + "_e" * path.stem.endswith("_e"),
            context=before + record.text("context"),
            question=after.replace("{input}", record.text("input")),
            answer_prefix="",
            answers=record.texts("answers"),
            max_new_tokens=_SPECIFICATION["max_new_tokens"][dataset],
            scorer=SCORER_OF[dataset],
            labels={"length": length_bucket(record.get("length", (int, float), "a number"))},
            classes=record.texts("all_classes") if dataset in ("trec", "lsht") else (),
            chat=dataset not in _SPECIFICATION["without_chat"],
            stop=("\n",) if dataset == "samsum" else (),
        )

    return read_examples(path, limit, example)
