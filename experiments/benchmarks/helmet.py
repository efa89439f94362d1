"""HELMET (Yen et al. 2025, arXiv:2410.02694): the tasks that its own files hold, each as jsonl.

Read are retrieval of JSON values (`json_kv`), questions about retrieved passages (`kilt`: nq, triviaqa, hotpotqa, popqa) and
ranking of passages (`msmarco`). Its RULER files have the reader `ruler`; its tasks of InfiniteBench and LongBench have the
suites' own readers. Tasks that a judge scores, or that are fetched from the hub, are not read.

Templates are the suite's; there is no chat template, as in its `configs`. Two examples of
answers precede the question, as there. Questions and rankings take them from the suite's file of demonstrations in the same
folder (`*_k3_*`, `*_k10_*`), and have none if it is not there. The suite samples 100 questions, and the demonstrations of a
ranking leave out all of them; here they leave out the question itself.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks.records import Record, read_records, shown
from experiments.benchmarks.scorers import fitted
from experiments.benchmarks.suites import FORMS
from experiments.tasks import Example

SHOTS = 2
POPULAR = 3  # logarithm to base 10 of the popularity from which questions of popqa are left out
_DEMONSTRATIONS = {  # of a file whose name begins so
    "nq": "nq-train*_k3_*",
    "triviaqa": "triviaqa-train*_k3_*",
    "hotpotqa": "hotpotqa-train*_k3_*",
    "popqa": "popqa*_k3_*",
    "test_reranking_data": "test_reranking_data_k10_*",
}


def _passages(record: Record) -> list[dict[str, Any]]:
    passages = record.get("ctxs", list, "a list of passages")
    wrong = [passage for passage in passages if not isinstance(passage, dict) or not isinstance(passage.get("text"), str)]
    if not passages or wrong:
        got = shown(wrong[0]) if wrong else "none"
        raise record.error(f"expected at least one passage with a 'text' in the field 'ctxs', got {got}")
    return passages


def _titled(record: Record) -> str:
    return "\n\n".join(f"Document (Title: {passage.get('title')}): {passage['text']}" for passage in _passages(record))


def _numbered(record: Record) -> str:
    passages = _passages(record)
    named = "title" in passages[0]
    return "\n\n".join(f"[ID: {x.get('id')}] Document{f' (Title: {x.get("title")})' * named}: {x['text']}" for x in passages)


def _relevance(record: Record) -> dict[str, int]:
    """Return the label of each passage, by the passage's id; the most relevant passage comes first."""
    labels = {}
    for passage in _passages(record):
        known, label = passage.get("id"), str(passage.get("label"))
        if not isinstance(known, str | int) or isinstance(known, bool) or not re.fullmatch(r"-?\d{1,9}(\.0)?", label):
            raise record.error(f"expected passages with an 'id' and a whole number as 'label', got {shown(passage)}")
        labels[str(known)] = int(float(label))
    return dict(sorted(labels.items(), key=lambda one: one[1], reverse=True))


def _demonstrations(record: Record, pool: Sequence[Record], key: str, show: Callable[[Record], str]) -> str:
    """Draw the suite's demonstrations of a question: a permutation that its text seeds, without repeats."""
    others = [other for other in pool if other.values.get(key) != record.values.get(key)]
    seed = int(hashlib.sha256(record.text(key).encode()).hexdigest(), 16) % 2**31
    chosen: dict[str, Record] = {}
    for at in np.random.default_rng(seed).permutation(len(others)):
        if len(chosen) < SHOTS:
            chosen.setdefault(others[at].text(key), others[at])
    return "".join(show(demonstration) + "\n\n" for demonstration in chosen.values())


def _is_popular(record: Record) -> bool:
    """Tell whether a question of popqa is about a popular subject: the suite leaves those out."""
    return record.has("s_pop") and math.log10(max(record.get("s_pop", (int, float), "a number"), 1)) >= POPULAR


def _json_kv(record: Record) -> Example:
    pairs = record.get("demos", list, "a list of keys and values")[:SHOTS]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise record.error(f"expected pairs of a key and a value in the field 'demos', got {shown(pair)}")
    demos = "\n\n".join(f"Key: {key}\nCorresponding value: {value}" for key, value in pairs) + "\n\n"
    values = {"context": record.text("context"), "question": record.text("question"), "demos": demos}
    return FORMS["helmet"]["json_kv"].example("json_kv", values, record.texts("answer"))


def _qa(record: Record, task: str, pool: Sequence[Record]) -> Example:
    def show(demo: Record) -> str:
        return f"{_titled(demo)}\n\nQuestion: {demo.text('question')}\nAnswer: {demo.texts('answers')[0]}"

    demos = _demonstrations(record, pool, "id" if record.has("id") else "question", show)
    values = {"context": _titled(record), "question": record.text("question"), "demos": demos}
    return FORMS["helmet"]["kilt"].example(task, values, record.texts("answers"), labels={"shots": SHOTS if pool else 0})


def _rerank(record: Record, pool: Sequence[Record]) -> Example:
    def ranking(ranked: Record) -> str:
        return " > ".join(_relevance(ranked))

    def show(demo: Record) -> str:
        return f"{_numbered(demo)}\n\nQuery: {demo.text('query')}\nRanking: {ranking(demo)}"

    demos = _demonstrations(record, pool, "qid", show)
    values = {"context": _numbered(record), "query": record.text("query"), "demos": demos}
    answers = (ranking(record), json.dumps(_relevance(record)))
    labels = {"shots": SHOTS if pool else 0}
    return FORMS["helmet"]["msmarco_rerank"].example("msmarco_rerank", values, answers, labels=labels)


def read_helmet(path: Path, limit: int | None = None) -> list[Example]:
    """Read a file of HELMET; its fields tell which task it is.

    Args:
        path: the file, for example `data/kilt/nq-dev-multikilt_1000_k50_dep6.jsonl`.
        limit: most lines to read.
    """
    pattern = next((pattern for name, pattern in _DEMONSTRATIONS.items() if path.name.startswith(name)), None)
    files = sorted(path.parent.glob(pattern)) if pattern else []
    pool = [record for file in files[:1] for record in read_records(file) if not _is_popular(record)]

    def example(record: Record) -> Example:
        if record.has("num_kvs"):
            return fitted(record, _json_kv(record))
        if record.has("query"):
            return fitted(record, _rerank(record, pool))
        if record.has("ctxs") and record.has("answers"):
            return fitted(record, _qa(record, path.name.partition("-")[0].partition("_")[0], pool))
        raise record.error(
            "expected HELMET's fields 'num_kvs' (json_kv), 'query' (msmarco) or 'ctxs' and 'answers' (kilt), got "
            f"{sorted(map(str, record.values))}"
        )

    return [example(record) for record in read_records(path, limit) if not _is_popular(record)]
