"""The main job, `python -m kvjax demo`: needles in real prose, found under each KV-cache method and budget.

Each context hides several needles at different depths and is asked about each of them, all questions in one batch.

**Protocol.** Full is always run first, as the reference. Where a question stands is recorded per row of the table:

* ``extend``: the context is prefilled *once* under the method, `kvjax.fork` copies the compressed cache for every question,
  and the question follows through `kvjax.extend`; the method compresses without knowing what will be asked.
* ``prefill``: the question ends the prompt, one row per question, and the method compresses knowing it.

``auto`` (the default) takes ``prefill`` for methods that choose tokens by what the prompt's last queries attend to
(SnapKV: its paper has the question there, and without it the vote is about nothing) and ``extend`` for all others: for Full,
StreamingLLM and Quest both give the same cache, H2O and KeyDiff do not ask who is asking. It is also how published
comparisons run (query-aware methods see the question, others do not).

Times leave compilation out; tokens/s counts decoding of all questions of a context in one batch. Bytes are per question.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kvjax
from experiments import record
from experiments.tasks import Question, Words, get_task, haystack_for, make_document, score
from kvjax import registry
from kvjax.method import Method, SlotMethod
from kvjax.timing import CompileClock, Timer

QUESTION_PLACES = ("auto", "prefill", "extend")
_ONE_QUESTION = ("passkey", "number_string")  # tasks whose contexts hide a single needle
_SPARE_TOKENS = 8  # an answer may be this much longer than its reference


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run; see `python -m kvjax demo --help`.

    Raises:
        ValueError: a number below 1, an unknown task, method or question place, or an unreadable budget.
    """

    length: int = 2048
    samples: int = 3
    questions: int = 4
    budgets: tuple[str, ...] = ("1/8", "1/4")
    methods: tuple[str, ...] = ("streamingllm", "snapkv", "h2o", "keydiff", "quest")
    tasks: tuple[str, ...] = ("niah_single_2",)
    haystack: str = "prose"
    question: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "samples", "questions"):
            if (value := vars(self)[name]) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.question not in QUESTION_PLACES:
            raise ValueError(f"question must be one of {QUESTION_PLACES}, got {self.question!r}")
        for name in self.tasks:
            get_task(name)
        runs(self)


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of the table."""

    name: str  # method name
    share: str  # budget as it was given, "" for Full
    budget: int | None  # tokens
    method: Method
    question: str  # "prefill" or "extend"


@dataclasses.dataclass(frozen=True)
class Context:
    """One tokenised context with its questions, filled up to the same number of rows everywhere."""

    task: str
    tokens: list[int]
    questions: tuple[Question, ...]
    asked: list[list[int]]  # token ids, one list per question


def runs(settings: Settings) -> list[Run]:
    """Full, then every method at every budget.

    Raises:
        ValueError: unknown method, or a budget that is no share or number or that the method refuses.
    """
    made = [_make_run("full", "", None, settings)]
    for name in dict.fromkeys(name.strip().lower() for name in settings.methods):
        cls = type(registry.make(name))
        if name == "full":
            continue
        if "budget" not in [knob.name for knob in registry.knobs(cls)]:
            made.append(_make_run(name, "", None, settings))
            continue
        made += [
            _make_run(name, share.strip(), _tokens(share, settings.length), settings)
            for share in settings.budgets
        ]
    return made


def _make_run(name: str, share: str, budget: int | None, settings: Settings) -> Run:
    method = registry.make(name, **({} if budget is None else {"budget": budget}))
    place = settings.question
    if place == "auto":
        place = "prefill" if isinstance(method, SlotMethod) and method.obs_window > 0 else "extend"
    return Run(name, share, budget, method, place)


def _tokens(share: str, length: int) -> int:
    """``1/8`` or ``0.125`` of the length, or a number of tokens."""
    top, _, bottom = share.strip().partition("/")
    try:
        value = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if not (0 < value <= 1 or (value > 1 and value == int(value) and not bottom)):
        raise ValueError(f"a budget is a share such as 1/8 or a number of tokens such as 256, got {share!r}")
    return round(value * length) if bottom or value < 1 else int(value)


def make_contexts(settings: Settings, tokenizer: Any) -> list[Context]:
    """Held-out contexts of every task, in an order that mixes the tasks; context i depends on (task, length, seed, i)."""

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    words = Words("eval")
    made = []
    for index in range(settings.samples):
        for name in settings.tasks:
            kind = settings.haystack if get_task(name).haystack else None
            document = make_document(
                name,
                random.Random(f"demo/{name}/{settings.length}/{settings.seed}/{index}"),
                settings.length,
                count,
                haystack_for(name, kind, count, "eval"),
                words,
                num_questions=1 if name in _ONE_QUESTION else settings.questions,
            )
            asked = [
                tokenizer.encode(q.question + q.answer_prefix, add_special_tokens=False).ids
                for q in document.questions
            ]
            made.append(Context(name, tokenizer.encode(document.context).ids, document.questions, asked))
    return made


class _Player:
    """Runs one method on one context; every context has the same shapes, so each run compiles once."""

    def __init__(self, params: Any, config: Any, tokenizer: Any, contexts: list[Context]) -> None:
        self._params, self._config, self._tokenizer = params, config, tokenizer
        self._rows = max(len(context.asked) for context in contexts)
        self._question_room = max(len(ids) for context in contexts for ids in context.asked)
        self._context_room = max(len(context.tokens) for context in contexts)
        self.answer_tokens = max(
            min(
                len(tokenizer.encode(q.target, add_special_tokens=False).ids) + _SPARE_TOKENS,
                get_task(context.task).max_new_tokens,
            )
            for context in contexts
            for q in context.questions
        )

    def play(self, run: Run, context: Context, clock: CompileClock) -> dict[str, Any]:
        """Answers, their scores, the method's accounting and the seconds they took."""
        # A context with fewer questions repeats its first one, which is not scored.
        asked = context.asked + [context.asked[0]] * (self._rows - len(context.asked))
        with Timer(clock) as reading:
            cache = jax.block_until_ready(self._read(run, context, asked))
        with Timer(clock) as writing:
            out = kvjax.generate(self._params, cache, max_new_tokens=self.answer_tokens)
            tokens, counts = jax.device_get((out.tokens, out.num_tokens))
        answers = []
        for row, question in enumerate(context.questions):
            ids = tokens[row, : counts[row]].tolist()
            text = self._tokenizer.decode([token for token in ids if token not in self._config.eos_token_ids])
            answers.append(
                {
                    "task": context.task,
                    "question": question.question.strip(),
                    "expected": list(question.answers),
                    "text": text,
                    "tokens": ids,
                    "score": score(context.task, text, question.answers),
                }
            )
        return {
            "answers": answers,
            "stats": jax.device_get(out.stats),
            "rows": self._rows,
            "generated": int(counts.sum()),
            "read": reading.run,
            "write": writing.run,
            "compile": reading.compile + writing.compile,
        }

    def _read(self, run: Run, context: Context, asked: list[list[int]]) -> kvjax.Cache:
        if run.question == "prefill":
            prompts = [context.tokens + question for question in asked]
            tokens, lengths = _padded(prompts, self._context_room + self._question_room)
            return kvjax.prefill(
                self._params,
                tokens,
                config=self._config,
                method=run.method,
                lengths=lengths,
                max_new_tokens=self.answer_tokens,
            )
        tokens, lengths = _padded([context.tokens], self._context_room)
        once = kvjax.prefill(
            self._params,
            tokens,
            config=self._config,
            method=run.method,
            lengths=lengths,
            max_new_tokens=self._question_room + self.answer_tokens,
        )
        tokens, lengths = _padded(asked, self._question_room)
        return kvjax.extend(self._params, kvjax.fork(once, len(asked)), tokens, lengths=lengths)


def _padded(rows: list[list[int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    padded = np.zeros((len(rows), size), np.int32)
    for row, ids in enumerate(rows):
        padded[row, : len(ids)] = ids
    return padded, np.asarray([len(ids) for ids in rows], np.int32)


def run(
    params: Any, config: Any, tokenizer: Any, settings: Settings, *, model: str, progress: bool = True
) -> dict[str, Any]:
    """Runs the demo.

    Args:
        params: model parameters.
        config: the model.
        tokenizer: its tokenizer.
        settings: what to run.
        model: name for the record.
        progress: whether to show a progress bar.

    Returns:
        The record (see `experiments.record`), one metric per method and budget, and every answer under "answers".

    Raises:
        ValueError: a length too short for the task or too long for the model.
    """
    begun = time.monotonic()
    contexts = make_contexts(settings, tokenizer)
    player = _Player(params, config, tokenizer, contexts)
    table_runs = runs(settings)
    metrics, texts, reference = [], [], []
    total = len(table_runs) * sum(len(context.questions) for context in contexts)
    with CompileClock() as clock, tqdm(total=total, unit="answer", disable=not progress) as bar:
        for one in table_runs:
            bar.set_description(f"{one.name} {one.share}".strip())
            bar.set_postfix_str("compiling")
            played, scores = [], []
            for context in contexts:
                played.append(player.play(one, context, clock))
                scores += [answer["score"] for answer in played[-1]["answers"]]
                bar.set_postfix_str(f"accuracy {100 * np.mean(scores):.0f} %")
                bar.update(len(context.questions))
            answers = [answer for part in played for answer in part["answers"]]
            reference = reference or answers
            metrics.append(_metric(one, played, answers, reference))
            texts.append(
                {
                    "method": one.name,
                    "budget": one.share,
                    "answers": [
                        {key: value for key, value in answer.items() if key != "tokens"} for answer in answers
                    ],
                }
            )
    described = {
        **dataclasses.asdict(settings),
        "model": model,
        "dtype": config.dtype,
        "decoding": "greedy",
        "max_new_tokens": player.answer_tokens,
        "prompt_tokens": [len(c.tokens) + len(c.asked[0]) for c in contexts],
    }
    made = record.make_record("demo", described, metrics)
    return {
        **made,
        "wall_seconds": round(time.monotonic() - begun, 1),
        "compile_seconds": round(clock.seconds, 1),
        "answers": texts,
    }


def _metric(one: Run, played: list[dict], answers: list[dict], reference: list[dict]) -> dict[str, Any]:
    stats = [part["stats"] for part in played]
    accuracy = 100 * float(np.mean([answer["score"] for answer in answers]))
    best = 100 * float(np.mean([answer["score"] for answer in reference]))
    same = [answer["tokens"] == full["tokens"] for answer, full in zip(answers, reference, strict=True)]
    return {
        "name": "accuracy",
        "value": round(accuracy, 2),
        "unit": "percent",
        "method": one.name,
        "budget": one.share,
        "budget_tokens": one.budget,
        "question": one.question,
        "samples": len(answers),
        "percent_of_full": round(100 * accuracy / best, 1) if best else None,
        "agreement_percent": round(100 * float(np.mean(same)), 1),
        "attended_tokens": round(float(np.mean([s.attended for s in stats])), 1),
        "length_tokens": round(float(np.mean([s.length for s in stats])), 1),
        "kv_bytes_per_row": round(stats[0].resident_bytes / played[0]["rows"]),
        "bytes_read_per_step_per_row": round(float(np.mean([s.bytes_read for s in stats]))),
        "tokens_per_second": round(
            sum(p["generated"] for p in played) / max(sum(p["write"] for p in played), 1e-9), 1
        ),
        "read_seconds_per_context": round(float(np.mean([part["read"] for part in played])), 3),
        "compile_seconds": round(sum(part["compile"] for part in played), 2),
        # Full has no effect by definition; for others it means that the comparison says nothing.
        "no_effect": one.name != "full" and all(bool(np.all(s.is_no_op)) for s in stats),
    }
