"""LongBench v1 and LongBench-E (Bai et al. 2023, arXiv:2308.14508): a jsonl file for each dataset.

Templates and generation lengths are the benchmark's own (`longbench_v1.json`). The whole template belongs to the user's turn
of a chat, so the question is the text after `{context}`, and the answer prefix is empty.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import json
from pathlib import Path
from typing import Any

from experiments.benchmarks.base import Example
from experiments.benchmarks.records import Record, read_jsonl

SCORER_OF: dict[str, str] = {
    "narrativeqa": "longbench_f1",
    "qasper": "longbench_f1",
    "multifieldqa_en": "longbench_f1",
    "multifieldqa_zh": "longbench_f1_zh",
    "hotpotqa": "longbench_f1",
    "2wikimqa": "longbench_f1",
    "musique": "longbench_f1",
    "dureader": "longbench_rouge_zh",
    "gov_report": "longbench_rouge",
    "qmsum": "longbench_rouge",
    "multi_news": "longbench_rouge",
    "vcsum": "longbench_rouge_zh",
    "trec": "longbench_class_line",
    "triviaqa": "longbench_f1_line",
    "samsum": "longbench_rouge_line",
    "lsht": "longbench_class_line",
    "passage_count": "longbench_count",
    "passage_retrieval_en": "longbench_retrieval",
    "passage_retrieval_zh": "longbench_retrieval",
    "lcc": "longbench_code",
    "repobench-p": "longbench_code",
}
# LongBench's predictor uses no chat template for few-shot prompts and code.
WITHOUT_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")


@functools.cache
def _specification() -> dict[str, Any]:
    file = importlib.resources.files("experiments.benchmarks") / "longbench_v1.json"
    return json.loads(file.read_text(encoding="utf-8"))


def length_bucket(length: float) -> str:
    """Return LongBench-E's bucket of a record's `length` (in words, or in characters of Chinese)."""
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def _dataset_of(record: Record, path: Path) -> str:
    named = record.text("dataset") if record.has("dataset") else path.stem
    name = named.removesuffix("_e")
    if name not in SCORER_OF:
        near = difflib.get_close_matches(name, SCORER_OF, n=1, cutoff=0.0)[0]
        raise record.error(
            f"unknown LongBench dataset {named!r}, did you mean {near!r}? expected one of {', '.join(SCORER_OF)}"
        )
    return name


def read_longbench(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of LongBench or LongBench-E; the names of LongBench-E's files and tasks end in `_e`.

    Args:
        path: the file. Records have `input, context, answers, length, dataset, all_classes`; without
            `dataset` the file's name is the dataset.

    Raises:
        ValueError: the file or the dataset does not exist, or a line lacks LongBench's form; the message names the file, the
            line, what was found and what was expected.
    """
    specification = _specification()
    examples = []
    for record in read_jsonl(path, limit):
        dataset = _dataset_of(record, path)
        before, after = specification["templates"][dataset].split("{context}")
        length = record.get("length", (int, float), "a number")
        example = Example(
            task=dataset + "_e" * path.stem.endswith("_e"),
            context=before + record.text("context"),
            question=after.replace("{input}", record.text("input")),
            answer_prefix="",
            answers=record.texts("answers"),
            max_new_tokens=specification["max_new_tokens"][dataset],
            scorer=SCORER_OF[dataset],
            labels={"length": length_bucket(length)},
            classes=record.texts("all_classes") if dataset in ("trec", "lsht") else (),
            chat=dataset not in WITHOUT_CHAT,
            stop=("\n",) if dataset == "samsum" else (),
        )
        examples.append(record.fitted(example))
    return examples
