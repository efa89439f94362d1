"""The data types of a task: a context with its questions, a sample, a request to a generator, and the task itself."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.tasks.code_files import Library
from experiments.tasks.haystack import Haystack
from experiments.tasks.qa_data import QaData
from experiments.tasks.words import Words


class TooShort(ValueError):
    """The length leaves no room for the task: a needle, a question, an answer."""


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        question: text that follows the context (begins with a newline).
        answer_prefix: text that opens the answer; prompt = context + question + answer_prefix.
        answers: reference strings that the scorer looks for.
        target: the continuation that a model is trained to write after the prefix (without end-of-sequence).
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str


@dataclasses.dataclass(frozen=True)
class Sample:
    """An evaluation prompt with its references.

    Attributes:
        task: registry name.
        context: instruction header and haystack; it can be prefilled once for many questions.
        question: text that follows the context.
        answer_prefix: text that opens the answer.
        answers: reference strings.
        max_new_tokens: most tokens that the model may generate.
        target: the trained continuation.
        system: text of the system turn; "" leaves the turn to the chat template.
    """

    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    target: str = ""
    system: str = ""

    @property
    def opening(self) -> str:
        """What a prompt without a system turn begins with: the system text, if there is one, and the context."""
        return f"{self.system}\n\n{self.context}" if self.system else self.context

    @property
    def prompt(self) -> str:
        """The whole prompt without a chat template: opening + question + answer prefix."""
        return self.opening + self.question + self.answer_prefix


@dataclasses.dataclass(frozen=True)
class Document:
    """A context and all questions that are asked about it.

    Attributes:
        task: registry name.
        context: instruction header and haystack.
        questions: at least one question.
        max_new_tokens: most tokens of an answer.
        system: text of the system turn; "" leaves the turn to the chat template.
    """

    task: str
    context: str
    questions: tuple[Question, ...]
    max_new_tokens: int
    system: str = ""

    def samples(self) -> list[Sample]:
        """List the questions as samples that share the context."""
        shared = {name: value for name, value in vars(self).items() if name != "questions"}
        return [Sample(**shared, **vars(question)) for question in self.questions]


@dataclasses.dataclass(frozen=True)
class Request:
    """The single argument of every generator: which document to make.

    Attributes:
        task: registry name.
        rng: the only source of randomness; generating advances it.
        length: limit in tokens on context + questions + generated tokens.
        count_tokens: text -> number of tokens.
        haystack: sentences to hide the needles in (unused by tasks that make their own), or the questions of a file, or
            files of code.
        words: keys and values of a split.
        depth: where the first queried needle goes, 0 (start) to 1 (end); None draws the depth.
        num_questions: number of questions about the context, at least 1; more questions bring more needles.
        training: whether to reserve room for the targets of all questions, each with its end-of-sequence, instead of the
            suite's generation length for a single answer. The finished prompt is then not counted again.
        index: the index of the file's question to ask, modulo the number of questions; None asks a random question.
    """

    task: str
    rng: random.Random
    length: int
    count_tokens: Callable[[str], int]
    haystack: Haystack | QaData | Library
    words: Words
    depth: float | None = None
    num_questions: int = 1
    training: bool = False
    index: int | None = None

    def answer_room(self, questions: Sequence[Question], limit: int) -> int:
        """Count the tokens to reserve for answers: `limit` or, in training, all targets with their end-of-sequence."""
        return sum(self.count_tokens(q.target) + 1 for q in questions) if self.training else limit

    def question_tokens(self, questions: Sequence[Question]) -> int:
        """Count the tokens of the questions and answer prefixes."""
        return sum(self.count_tokens(q.question + q.answer_prefix) for q in questions)


def join_answers(values: Sequence[str]) -> str:
    """Join queries as the suite does: `a`, `a, and b`, `a, b, and c`."""
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + ", and " + values[-1]


@dataclasses.dataclass(frozen=True)
class Task:
    """A registry entry.

    Attributes:
        name: registry name.
        generate: `generate(request)` -> `Document`; `TooShort` if the request's length leaves no room for the task.
        score: `score(prediction, answers)` -> float in [0, 1].
        haystack: kind of haystack in the suite: "noise", "prose", "" (the task makes its own), or "squad" or "hotpotqa"
            (the questions come from a file in this format, which the user brings).
        max_new_tokens: most tokens of an answer (`Document.max_new_tokens` may be fewer).
        takes_depth: whether a request can set the depth of the first queried needle.
        max_questions: most questions about a context; None allows as many as fit.
        about: what the task asks for, in a few words.
        load: `load(count_tokens, split)` -> what the task is made from instead of a haystack; None for tasks without.
        chat: whether a chat template wraps the prompt, see `experiments.benchmarks.Example`.
        measures: more scores of an answer by name, which a result has beside `score`.
        in_turns: whether a question may refer to the questions before it, so that several questions about a context are
            asked in turns alone.
        right_steps: tells for each of the answers, which are steps in order, whether a prediction has it; the score is the
            share of them. None for a task without steps.
    """

    name: str
    generate: Callable[[Request], Document]
    score: Callable[[str, Sequence[str]], float]
    haystack: str
    max_new_tokens: int
    takes_depth: bool = True
    max_questions: int | None = None
    about: str = ""
    load: Callable[[Callable[[str], int], str], Any] | None = None
    chat: bool = True
    measures: Mapping[str, Callable[[str, Sequence[str]], float]] = dataclasses.field(default_factory=dict)
    in_turns: bool = False
    right_steps: Callable[[str, Sequence[str]], Sequence[bool]] | None = None

    @property
    def needs_file(self) -> bool:
        """Whether the task has to be given a file ("file:PATH" as its haystack)."""
        return self.haystack not in ("", "noise", "prose")
