"""Runs a demo: questions about needles in prose under each KV-cache method and budget.

Each context hides several needles at different depths. All questions about a context are asked in a batch.

**Protocol.** Full always runs first, as the reference. Every row says where its questions stand:

* ``extend``: the context is prefilled *once* under the method, `kvjax.fork` copies the compressed cache for every question,
  and the question follows through `kvjax.extend`. So the method compresses without knowing the question.
* ``prefill``: the question ends the prompt, and every question has a prompt of its own. So the method compresses with the
  question in sight.

``auto`` (the default) is ``prefill`` for methods that choose tokens by the attention of the prompt's last queries, and
``extend`` for all other methods. SnapKV and SentenceKV choose by the last queries: in their papers the prompt ends with the
question, and without it their votes say nothing about the answer. Full, StreamingLLM and Quest end with the same cache either
way, and H2O and KeyDiff do not single out the question. Published comparisons also show the question only to methods that use
it.

Times leave compilation out. Tokens per second count the batched decoding of all questions of a context. Bytes are per
question.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from typing import Any

import jax
import numpy as np

import models
from experiments.answering import LoadedModel, Shape, account, ask, equal_rows, programs
from experiments.demo.settings import DemoSettings, Run, runs, with_budgets
from experiments.evaluation import CompileAhead
from experiments.records import CompileClock, Timer, make_record
from experiments.tasks import Question, Words, encode_prompt, get_task, haystack_for, make_document, score
from kvjax.decoding.layers import check_quantisable, layer_methods
from kvjax.plugins import path_of
from models.hub.progress import progress_bar

_SPARE_TOKENS = 8  # an answer may be longer than its reference by this many tokens


@dataclasses.dataclass(frozen=True)
class Context:
    """A context with its questions, as text and as tokens.

    Attributes:
        task: name of the task.
        tokens: token ids of the context.
        questions: the questions about the context.
        asked: token ids of each question.
    """

    task: str
    tokens: list[int]
    questions: tuple[Question, ...]
    asked: list[list[int]]


def make_contexts(settings: DemoSettings, tokenizer: Any, around: tuple[str, str] | None = None) -> list[Context]:
    """Make held-out contexts; the tasks take turns.

    A task's context i depends only on the task, the length, the seed and i.

    Args:
        settings: what to run.
        tokenizer: the model's tokenizer.
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
            tokens = encode(before + document.context) if around else encode_prompt(tokenizer, document.context)
            made.append(Context(name, tokens, document.questions, asked))
    return made


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes that all contexts share, so that a method compiles once.

    Attributes:
        rows: questions that are asked together, a multiple of `groups`.
        groups: the parts into which a mesh divides the rows.
        context: the most tokens of a context.
        question: the most tokens of a question.
        answer: the most tokens of an answer.
    """

    rows: int
    groups: int
    context: int
    question: int
    answer: int

    @classmethod
    def of(cls, model: LoadedModel, contexts: list[Context]) -> _Sizes:
        """Compute the sizes of some contexts."""
        answers = [
            min(
                len(model.tokenizer.encode(q.target, add_special_tokens=False).ids) + _SPARE_TOKENS,
                get_task(context.task).max_new_tokens,
            )
            for context in contexts
            for q in context.questions
        ]
        return cls(
            rows=equal_rows(max(len(context.asked) for context in contexts), model.groups),
            groups=model.groups,
            context=max(len(context.tokens) for context in contexts),
            question=max(len(ids) for context in contexts for ids in context.asked),
            answer=max(answers),
        )

    def shape(self, question: str) -> Shape:
        """Return the shape of a batch whose questions stand in the prompt ("prefill") or after it ("extend")."""
        if question == "prefill":
            return Shape(self.context + self.question, self.rows, self.answer)
        each = self.rows // self.groups  # each group of devices prefills the context, and answers its part of the questions
        return Shape(self.context, self.groups, self.answer, each, self.question, together=True)


def _play(model: LoadedModel, run: Run, context: Context, sizes: _Sizes, clock: CompileClock) -> dict[str, Any]:
    """Answer a context's questions; return scored answers, and the accounting and seconds of the method."""
    shape = sizes.shape(run.question)
    if run.question == "prefill":
        contexts, questions = [context.tokens + question for question in context.asked], []
    else:
        questions = [context.asked[at : at + shape.questions] for at in range(0, len(context.asked), shape.questions)]
        contexts = [context.tokens] * len(questions)
    more: dict[str, Any] = {"questions": questions, "clock": clock, "kv_dtype": model.kv_dtype}
    asked = ask(model.params, model.config, contexts, run.method, shape, **more)
    answers = []
    for ids, question in zip([ids for mine in asked.ids for ids in mine], context.questions, strict=True):
        text = model.tokenizer.decode([token for token in ids if token not in model.config.eos_token_ids])
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
    return {"answers": answers, "asked": asked}


def run_demo(model: LoadedModel, settings: DemoSettings, *, progress: bool = True) -> dict[str, Any]:
    """Run the demo.

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
    sizes = _Sizes.of(model, contexts)
    table_runs = runs(settings, model.tokenizer, model.config.vocab_size)
    for row in table_runs:  # before anything runs
        check_quantisable(layer_methods(row.method, model.config), settings.kv_dtype)
    metrics, texts, reference = [], [], []
    total = len(table_runs) * sum(len(context.questions) for context in contexts)
    bar = progress_bar(total=total, unit="answer", disable=not progress)
    with CompileClock() as clock, CompileAhead() as ahead, bar:
        for number, row in enumerate(table_runs):
            bar.set_description(f"{row.name} {row.share}".strip())
            bar.set_postfix_str("compiling")
            with Timer(clock) as waiting:  # in parallel, but without programs of other methods, which would disturb the times
                shape = sizes.shape(row.question)
                ahead.add(
                    number,
                    functools.partial(
                        programs, model.params, model.config, [row.method], shape, kv_dtype=model.kv_dtype
                    ),
                )
                ahead.wait(number)
            played, scores = [], []
            for context in contexts:
                played.append(_play(model, row, context, sizes, clock))
                scores += [answer["score"] for answer in played[-1]["answers"]]
                bar.set_postfix_str(f"accuracy {100 * np.mean(scores):.0f} %", refresh=False)
                bar.update(len(context.questions))
            answers = [answer for part in played for answer in part["answers"]]
            reference = reference or answers
            metrics.append(_metric(row, played, sizes.rows, reference, waiting.run + waiting.compile))
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
        "max_new_tokens": sizes.answer,
        "prompt_tokens": [len(c.tokens) + len(c.asked[0]) for c in contexts],
    }
    made = make_record("demo", described, metrics)
    return {
        **made,
        "wall_seconds": round(time.monotonic() - begun, 1),
        "compile_seconds": round(sum(metric["compile_seconds"] for metric in metrics), 1),
        "answers": texts,
    }


def _metric(row: Run, played: list[dict], rows: int, reference: list[dict], waited: float) -> dict[str, Any]:
    answers, asked = [answer for part in played for answer in part["answers"]], [part["asked"] for part in played]
    stats = [one for part in asked for one in part.stats]
    accounting = account(stats, rows)
    generated, decoding = sum(len(answer["tokens"]) for answer in answers), sum(part.decode_seconds for part in asked)
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
        "tokens_per_second": round(generated / max(decoding, 1e-9), 1),
        "read_seconds_per_context": round(float(np.mean([part.run_seconds - part.decode_seconds for part in asked])), 3),
        "compile_seconds": round(waited + sum(part.compile_seconds for part in asked), 2),
        # Full has no effect by definition. For any other method no effect means that the comparison says nothing.
        "no_effect": row.name != "full" and all(bool(np.all(s.is_no_op[:real])) for real, s in stats),
    }
