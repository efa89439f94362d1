"""One cell under a method: its batches, answers and scores, and its row of the table."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import (
    Asked,
    LoadedModel,
    Shape,
    account,
    ask_in_turn,
    batch_rows,
    equal_rows,
    most_rows,
    padded_length,
    reads_all,
)
from experiments.benchmarks import Cell, Encoded, digest, measures, score
from experiments.evaluation.same_examples import DIGEST
from experiments.records import LIBRARY_FIELD, CompileClock, percent_interval
from experiments.tasks import library_origin, reads_library
from kvjax.protocol.method import Method

# Texts are padded to multiples of these numbers of tokens, so that tasks share a compiled program.
_NEW_TOKENS = 128
_QUESTION_TOKENS = 128
SECONDS = ("seconds", "answer_seconds", "compile_seconds")  # of a row: prompts and answers, answers alone, compilation
COSTS = (
    "attended_tokens", "length_tokens", "bytes_read_per_step", "full_bytes_read_per_step", "resident_bytes_per_row",
    "counters",
)  # fmt: skip
SHARED_TOKENS = 512  # longer answers need so much room that they get a program of their own


@dataclasses.dataclass(frozen=True)
class Batch:
    """Contexts of the same shape.

    Attributes:
        shape: the shape, which decides the compiled program.
        units: for each context the indices of the examples that are asked about it.
    """

    shape: Shape
    units: tuple[tuple[int, ...], ...]


def make_batches(
    encoded: Encoded,
    question: str,
    batch_tokens: int,
    limit: int | None,
    new_tokens: int | None = None,
    *,
    samples: int = 0,
    room: int = 0,
    groups: int = 1,
) -> list[Batch]:
    """Sort a cell's examples into batches.

    Generated cells of one length get one shape, whatever their tasks, if they get the same ``samples`` and ``room``.

    Args:
        question: where the question stands: "prefill", "extend" or "turns".
        batch_tokens: rows x length of a batch, at most.
        limit: the most tokens that the model can take; None if there is no limit.
        samples: the most contexts of any generated cell of the run; they decide the number of rows.
        room: the least room for answers, in tokens.
        groups: the rows of a batch are a multiple of this number (`LoadedModel.groups`).

    Returns:
        A single batch for a generated cell; a batch for each padded length for a file's cell.
    """
    count = range(len(encoded.examples))
    if question == "prefill":
        units = [(i,) for i in count]
        texts = encoded.wholes
    else:
        together = itertools.groupby(count, key=lambda i: encoded.examples[i].group or i)
        units = [tuple(members) for _, members in together]
        texts = encoded.heads
    by_length: dict[int, list[tuple[int, ...]]] = {}
    for unit in units:
        size = len(texts[unit[0]])
        by_length.setdefault(max(encoded.cell.length or padded_length(size), size), []).append(unit)
    batches = []
    for length, members in sorted(by_length.items()):
        answer = new_tokens or max(encoded.examples[i].max_new_tokens for unit in members for i in unit)
        wanted = padded_length(max(answer, room), _NEW_TOKENS)
        if limit is not None and question == "turns":
            longest = max(len(encoded.wholes[i]) for unit in members for i in unit)
            wanted = max(min(wanted, limit - longest), answer)
        rows = batch_rows(length, batch_tokens, max(len(members), samples), groups)
        if encoded.cell.length is None:  # groups of a file's examples have any size: let them share a few numbers of rows
            rows = min(equal_rows(padded_length(rows, 1), groups), most_rows(length, batch_tokens, groups))
        shape = Shape(length, rows, wanted)
        if question != "prefill":
            asked = max(len(encoded.tails[i]) for unit in members for i in unit)
            shape = dataclasses.replace(
                shape,
                questions=max(len(unit) for unit in members),
                question_length=padded_length(asked, _QUESTION_TOKENS),
                keep=question == "turns",
            )
        batches.append(Batch(shape, tuple(members)))
    return batches


def with_room(config: Any, shape: Shape, methods: Sequence[Method]) -> Any:
    """Return the model's description with enough positions for all the room of a shape.

    A context and its answer fit the model as it is, because each answer has a limit of its own. But the room for answers is
    the same for all tasks, and would not fit behind the longest contexts. Nor would the pieces fit in which a method reads a
    context again (`Method.reread_tokens`), as its paper does behind the context. A conversation fits with all its turns.
    """
    if shape.keep:
        return config
    room = max(shape.room, *(method.reread_tokens(shape.length) for method in methods))
    return dataclasses.replace(config, max_position_embeddings=config.max_position_embeddings + room)


def answer_text(tokenizer: Any, ids: Sequence[int], limit: int, ends: Sequence[int], stop: Sequence[str]) -> str:
    """Decode the text to score: at most `limit` tokens, without end-of-text tokens, cut at the first stop text."""
    text = tokenizer.decode([token for token in ids[:limit] if token not in ends])
    for end in stop:
        while text.startswith(end):  # the suites forbid a stop text as the first token
            text = text.removeprefix(end)
        text = text.split(end)[0]
    return text


def answer_cell(
    model: LoadedModel,
    encoded: Encoded,
    methods: Sequence[Method],
    question: str,
    batches: Sequence[Batch],
    clock: CompileClock,
    new_tokens: int | None = None,
    tell: Callable[[str], None] = lambda _: None,
    parts: Sequence[int] = (),
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Answer and score a cell.

    Args:
        methods: the methods, which prefill the contexts together.
        question: where the question stands.
        batches: see `make_batches`.
        clock: counts compilation.
        tell, parts: see `experiments.answering.ask_in_turn`.

    Yields:
        For each method a metric for `experiments.records.make_record`, and a prediction for each example, as soon as the
        method has answered.
    """
    asked: list[list[Asked]] = [[] for _ in methods]  # asked[method][batch]
    for batch in batches:
        texts = encoded.wholes if question == "prefill" else encoded.heads
        answered = ask_in_turn(
            model.params,
            with_room(model.config, batch.shape, methods),
            [texts[unit[0]] for unit in batch.units],
            methods,
            batch.shape,
            questions=[[encoded.tails[i] for i in unit] for unit in batch.units] if question != "prefill" else (),
            limits=[[new_tokens or encoded.examples[i].max_new_tokens for i in unit] for unit in batch.units],
            clock=clock,
            kv_dtype=model.kv_dtype,
            tell=tell,
            parts=parts,
        )
        for mine, one in zip(asked, answered, strict=True):
            mine.append(one)
            if len(mine) == len(batches):
                yield _scored(model, encoded, batches, mine, new_tokens)


def _scored(
    model: LoadedModel, encoded: Encoded, batches: Sequence[Batch], asked: Sequence[Asked], new_tokens: int | None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Make the row and the predictions of a method from its answers in every batch."""
    ids: dict[int, list[int]] = {}
    for batch, one in zip(batches, asked, strict=True):
        for unit, answers in zip(batch.units, one.ids, strict=True):
            ids.update(zip(unit, answers, strict=True))
    accounts = [account(one.stats, batch.shape.rows) for batch, one in zip(batches, asked, strict=True)]
    times = ([one.run_seconds, one.decode_seconds, one.compile_seconds] for one in asked)
    seconds = {name: round(sum(spent), 2) for name, spent in zip(SECONDS, zip(*times, strict=True), strict=True)}
    predictions = predict(model, encoded, [ids[i] for i in range(len(encoded.examples))], new_tokens)
    costs = _mean(accounts, [len(batch.units) for batch in batches])
    return {**summary(encoded, predictions), **costs, **seconds}, predictions


def predict(
    model: LoadedModel, encoded: Encoded, ids: Sequence[Sequence[int]], new_tokens: int | None
) -> list[dict[str, Any]]:
    """Decode and score the answers of a cell.

    Args:
        ids: generated token ids of each example.

    Returns:
        A JSON object for each example.
    """
    predictions = []
    for index, example in enumerate(encoded.examples):
        limit = new_tokens or example.max_new_tokens
        text = answer_text(model.tokenizer, ids[index], limit, model.config.eos_token_ids, example.stop)
        predictions.append(
            {
                "key": encoded.keys[index],
                "task": example.task,
                "group": example.group,
                "labels": dict(example.labels),
                "question": example.question.strip()[-200:],
                "answers": list(example.answers),
                "prediction": text,
                "score": round(score(example, text), 6),
                **({"measures": more} if (more := measures(example, text)) else {}),
                "prompt_tokens": len(encoded.wholes[index]),
                "cut_tokens": encoded.cut[index],
                "answer_tokens": min(len(ids[index]), limit),
                "ended": not set(model.config.eos_token_ids).isdisjoint(ids[index][:limit]),
            }
        )
    return predictions


def summary(encoded: Encoded, predictions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compute the score of a cell, 0 to 100, with its interval, and means over the cell's examples."""
    scores = [line["score"] for line in predictions]
    return {
        "name": encoded.cell.task,
        "value": round(100 * float(np.mean(scores)), 2),
        "unit": "percent",
        "interval_95": percent_interval(scores, [line["group"] for line in predictions]),
        "examples": len(scores),
        DIGEST: digest(encoded.keys),
        "mean_prompt_tokens": round(float(np.mean([line["prompt_tokens"] for line in predictions])), 1),
        "mean_answer_tokens": round(float(np.mean([line["answer_tokens"] for line in predictions])), 1),
        "unfinished": sum(not line["ended"] for line in predictions),
        "cut_below_100": sum(not line["ended"] and line["score"] < 1 for line in predictions),
        "truncated": sum(line["cut_tokens"] > 0 for line in predictions),
        "by": _by_label(predictions),
        **_measured(predictions),
        **({LIBRARY_FIELD: library_origin()} if reads_code(encoded.cell) else {}),
    }


def reads_code(cell: Cell) -> bool:
    """Tell whether a cell's prompts are made from Python's standard library."""
    return cell.length is not None and reads_library(cell.task, cell.haystack)


def _measured(predictions: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Average each further measure, 0 to 100."""
    names = predictions[0].get("measures", {})
    return {name: round(100 * float(np.mean([line["measures"][name] for line in predictions])), 2) for name in names}


def joined(
    encoded: Encoded, old: Mapping[str, Any], kept: Sequence[Mapping[str, Any]], row: Mapping[str, Any], lines: Sequence[dict]
) -> dict[str, Any]:
    """Join the row of a cell's first examples with the row of the examples behind them.

    Args:
        encoded: all of the cell's examples.
        old: the row of the first examples.
        kept: their scores, as `experiments.evaluation.examples.brief` gives them.
        row: the row of the other examples, whose predictions are ``lines``.
    """
    old = {**dict.fromkeys(SECONDS, 0.0), "counters": {}, **old}  # a committed record leaves them out
    measured = {name: old[name] / 100 for name in lines[0].get("measures", {})}
    every = [
        {"score": one["score"], "group": one["group"], "labels": dict(example.labels), "prompt_tokens": len(whole)}
        | {"cut_tokens": cut, "answer_tokens": old["mean_answer_tokens"], "ended": True, "measures": measured}
        for one, example, whole, cut in zip(kept, encoded.examples, encoded.wholes, encoded.cut, strict=False)
    ]
    rows, contexts = (old, row), [len({x["group"] or at for at, x in enumerate(part)}) for part in (kept, lines)]
    made = {**row, **summary(encoded, [*every, *lines])}
    made |= {name: made[name] + old[name] for name in ("unfinished", "cut_below_100")}
    made |= _mean([{name: one[name] for name in COSTS} for one in rows], contexts)
    return made | {name: round(sum(one[name] for one in rows), 2) for name in SECONDS}


def _by_label(predictions: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute the mean score, 0 to 100, for every value of every label that has more than one value."""
    means: dict[str, dict[str, float]] = {}
    for label in dict.fromkeys(name for line in predictions for name in line["labels"]):
        values: dict[Any, list[float]] = {}
        for line in predictions:
            values.setdefault(line["labels"].get(label), []).append(line["score"])
        if len(values) > 1:
            means[label] = {str(value): round(100 * float(np.mean(scores)), 2) for value, scores in values.items()}
    return means


def _mean(accounts: Sequence[dict[str, Any]], weights: Sequence[int]) -> dict[str, Any]:
    """Average the accounting of batches, weighted by their numbers of contexts."""

    def mean(values: Sequence[float]) -> float:
        return round(float(np.average(values, weights=weights)), 4)

    names = [name for name in accounts[0] if name != "counters"]
    costs: dict[str, Any] = {name: mean([batch[name] for batch in accounts]) for name in names}
    costs["counters"] = {name: mean([batch["counters"][name] for batch in accounts]) for name in accounts[0]["counters"]}
    costs["no_effect"] = reads_all(costs)
    return costs
