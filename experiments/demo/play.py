"""Runs a demo: needles in prose, asked for under each KV-cache method and budget.

Each context hides several needles at different depths. All questions about a context are asked in a batch.

**Protocol.** Full always runs first, as the reference. Every row says where its questions stood:

* ``extend``: the context is prefilled *once* under the method, `kvjax.fork` copies the compressed cache for every question,
  and the question follows through `kvjax.extend`. So the method compresses without knowing the question.
* ``prefill``: the question ends the prompt, and every question has a row of its own. So the method compresses knowing it.

``auto`` (the default) is ``prefill`` for methods that choose tokens by the attention of the prompt's last queries, and
``extend`` for all others. SnapKV and SentenceKV choose so: in their papers the question stands there, and without it their
vote is about nothing. Full, StreamingLLM and Quest end with the same cache both ways, and H2O and KeyDiff do not single out
the question. Published comparisons do the same: methods that use the question see it, others do not.

Times leave compilation out. Tokens per second count decoding of all questions of a context in a batch. Bytes are per
question.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kvjax
import models
from experiments.answering import LoadedModel, account, equal_rows, pad
from experiments.demo.settings import DemoSettings, Run, runs, with_budgets
from experiments.evaluation import CompileAhead
from experiments.records import CompileClock, Timer, make_record
from experiments.tasks import Question, Words, get_task, haystack_for, make_document, score
from kvjax.outside import path_of
from kvjax.programs import lower_programs
from kvjax.quantised import check_quantisable
from kvjax.step import layer_methods

_SPARE_TOKENS = 8  # an answer may be longer than its reference by this many tokens


@dataclasses.dataclass(frozen=True)
class Context:
    """A context with its questions, as text and as tokens.

    Attributes:
        task: name of the task.
        tokens: token ids of the context.
        questions: the questions about it.
        asked: token ids of each question.
    """

    task: str
    tokens: list[int]
    questions: tuple[Question, ...]
    asked: list[list[int]]


def make_contexts(settings: DemoSettings, tokenizer: Any, around: tuple[str, str] | None = None) -> list[Context]:
    """Held-out contexts; the tasks take turns.

    A task's context i depends on the task, the length, the seed and i only.

    Args:
        settings: what to run.
        tokenizer: the model's.
        around: text before and after a user's content in the chat template; None without a template.
    """

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def count(text: str) -> int:
        return len(encode(text))

    before, after = around or ("", "")
    length = settings.length - (count(before + after) if around else 0)  # lengths include the chat template

    words = Words("eval")
    stacks = {
        name: haystack_for(name, settings.haystack if get_task(name).haystack else None, count, "eval")
        for name in settings.tasks
    }
    made = []
    for index in range(settings.samples):
        for name in settings.tasks:
            document = make_document(
                name,
                random.Random(f"demo/{name}/{settings.length}/{settings.seed}/{index}"),
                length,
                count,
                stacks[name],
                words,
                num_questions=min(settings.questions, get_task(name).max_questions or settings.questions),
            )
            asked = [encode(q.question + after + q.answer_prefix) for q in document.questions]
            # A template brings its own special tokens.
            tokens = encode(before + document.context) if around else tokenizer.encode(document.context).ids
            made.append(Context(name, tokens, document.questions, asked))
    return made


class _Player:
    """Runs a method on a context; all contexts are padded to the same shapes, so that a method compiles once."""

    def __init__(self, model: LoadedModel, contexts: list[Context]) -> None:
        self._params, self._config, self._tokenizer = model.params, model.config, model.tokenizer
        self._groups, self._kv_dtype = model.groups, model.kv_dtype
        self._rows = equal_rows(max(len(context.asked) for context in contexts), self._groups)
        self._question_room = max(len(ids) for context in contexts for ids in context.asked)
        self._context_room = max(len(context.tokens) for context in contexts)
        self.answer_tokens = max(
            min(
                len(model.tokenizer.encode(q.target, add_special_tokens=False).ids) + _SPARE_TOKENS,
                get_task(context.task).max_new_tokens,
            )
            for context in contexts
            for q in context.questions
        )

    def play(self, run: Run, context: Context, clock: CompileClock) -> dict[str, Any]:
        """Answers, their scores, the method's accounting and the seconds they took."""
        # A context with fewer questions than rows repeats its first question; the repeats are not scored.
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
            "stats": (len(context.questions), jax.device_get(out.stats)),
            "rows": self._rows,
            "generated": int(counts[: len(context.questions)].sum()),
            "read": reading.run,
            "write": writing.run,
            "compile": reading.compile + writing.compile,
        }

    def programs(self, run: Run) -> Iterator[jax.stages.Lowered]:
        """The programs that `play` runs, traced and lowered; none of an offloaded method."""
        if run.method.offload:
            return
        if run.question == "prefill":
            sizes = {"rows": self._rows, "length": self._context_room + self._question_room, "room": self.answer_tokens}
        else:
            sizes = {
                "rows": self._groups,
                "copies": self._rows // self._groups,
                "length": self._context_room,
                "room": self._question_room + self.answer_tokens,
                "question_length": self._question_room,
            }
        yield from lower_programs(
            self._params,
            config=self._config,
            methods=[run.method],
            max_new_tokens=self.answer_tokens,
            num_eos=len(self._config.eos_token_ids),
            kv_dtype=self._kv_dtype,
            **sizes,
        )

    def _read(self, run: Run, context: Context, asked: list[list[int]]) -> kvjax.Cache:
        if run.question == "prefill":
            prompts = [context.tokens + question for question in asked]
            tokens, lengths = pad(prompts, self._context_room + self._question_room)
            return kvjax.prefill(
                self._params,
                tokens,
                config=self._config,
                method=run.method,
                lengths=lengths,
                max_new_tokens=self.answer_tokens,
                kv_dtype=self._kv_dtype,
            )
        # On a mesh each group of devices reads the context, and answers its part of the questions.
        tokens, lengths = pad([context.tokens] * self._groups, self._context_room)
        once = kvjax.prefill(
            self._params,
            tokens,
            config=self._config,
            method=run.method,
            lengths=lengths,
            max_new_tokens=self._question_room + self.answer_tokens,
            kv_dtype=self._kv_dtype,
        )
        tokens, lengths = pad(asked, self._question_room)
        return kvjax.extend(self._params, kvjax.fork(once, len(asked) // self._groups), tokens, lengths=lengths)


def run_demo(model: LoadedModel, settings: DemoSettings, *, progress: bool = True) -> dict[str, Any]:
    """Runs the demo.

    Args:
        model: the model.
        settings: what to run.
        progress: whether to show a progress bar.

    Returns:
        The record (see `experiments.records.make_record`): a metric for each method and budget, and all answers under
        "answers".

    Raises:
        ValueError: a length that is too short for a task or too long for the model.
    """
    begun = time.monotonic()
    model.check_positions("--length", settings.length)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    settings = with_budgets(settings, parameters, jax.default_backend())
    template = models.ChatTemplate.from_directory(model.directory) if settings.template == "auto" else None
    contexts = make_contexts(settings, model.tokenizer, template.around() if template else None)
    model = dataclasses.replace(model, kv_dtype=settings.kv_dtype)
    player = _Player(model, contexts)
    table_runs = runs(settings, model.tokenizer, model.config.vocab_size)
    for row in table_runs:  # before anything runs
        check_quantisable(layer_methods(row.method, model.config), settings.kv_dtype)
    metrics, texts, reference = [], [], []
    total = len(table_runs) * sum(len(context.questions) for context in contexts)
    with CompileClock() as clock, CompileAhead() as ahead, tqdm(total=total, unit="answer", disable=not progress) as bar:
        for number, row in enumerate(table_runs):
            bar.set_description(f"{row.name} {row.share}".strip())
            bar.set_postfix_str("compiling")
            with Timer(clock) as waiting:  # side by side, but not those of other methods, which would disturb the times
                ahead.add(number, functools.partial(player.programs, row))
                ahead.wait(number)
            played, scores = [], []
            for context in contexts:
                played.append(player.play(row, context, clock))
                scores += [answer["score"] for answer in played[-1]["answers"]]
                bar.set_postfix_str(f"accuracy {100 * np.mean(scores):.0f} %", refresh=False)
                bar.update(len(context.questions))
            answers = [answer for part in played for answer in part["answers"]]
            reference = reference or answers
            metrics.append(_metric(row, played, answers, reference, waiting.run + waiting.compile))
            texts.append(
                {
                    "method": row.name,
                    "budget": row.share,
                    "answers": [{key: value for key, value in answer.items() if key != "tokens"} for answer in answers],
                }
            )
    described = {
        **dataclasses.asdict(settings),
        "model": model.name,
        "dtype": model.dtypes,
        "template": template.identity if template else None,
        "decoding": "greedy",
        "max_new_tokens": player.answer_tokens,
        "prompt_tokens": [len(c.tokens) + len(c.asked[0]) for c in contexts],
    }
    made = make_record("demo", described, metrics)
    return {
        **made,
        "wall_seconds": round(time.monotonic() - begun, 1),
        "compile_seconds": round(sum(metric["compile_seconds"] for metric in metrics), 1),
        "answers": texts,
    }


def _metric(row: Run, played: list[dict], answers: list[dict], reference: list[dict], waited: float) -> dict[str, Any]:
    stats = [part["stats"] for part in played]
    accounting = account(stats, played[0]["rows"])
    accuracy = 100 * float(np.mean([answer["score"] for answer in answers]))
    best = 100 * float(np.mean([answer["score"] for answer in reference]))
    same = [answer["tokens"] == full["tokens"] for answer, full in zip(answers, reference, strict=True)]
    return {
        "name": "accuracy",
        "value": round(accuracy, 2),
        "unit": "percent",
        "method": row.name,
        **({"class": path} if (path := path_of(type(row.method))) else {}),
        "budget": row.share,
        "budget_tokens": row.budget,
        "question": row.question,
        "samples": len(answers),
        "percent_of_full": round(100 * accuracy / best, 1) if best else None,
        "agreement_percent": round(100 * float(np.mean(same)), 1),
        "attended_tokens": accounting["attended_tokens"],
        "length_tokens": accounting["length_tokens"],
        "kv_bytes_per_row": accounting["resident_bytes_per_row"],
        "bytes_read_per_step_per_row": round(accounting["bytes_read_per_step"]),
        "tokens_per_second": round(sum(p["generated"] for p in played) / max(sum(p["write"] for p in played), 1e-9), 1),
        "read_seconds_per_context": round(float(np.mean([part["read"] for part in played])), 3),
        "compile_seconds": round(waited + sum(part["compile"] for part in played), 2),
        # Full has no effect by definition. For any other method no effect means that the comparison says nothing.
        "no_effect": row.name != "full" and all(bool(np.all(s.is_no_op)) for _, s in stats),
    }
