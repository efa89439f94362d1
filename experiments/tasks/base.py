"""The data types of a task: a context with its questions, an example, a request to a generator, and the task itself."""

import dataclasses
import difflib
import importlib.resources
import random
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.tasks.code_files import Library
from experiments.tasks.haystack import Haystack
from experiments.tasks.words import Words


class TooShort(ValueError):
    """The length leaves no room for the task: a needle, a question, an answer."""


@dataclasses.dataclass(frozen=True)
class Example:
    """A context, a question about it and its references; prompt = context + question + answer_prefix.

    The fields are named as the columns of kvpress's tables, so that users of kvpress can read their files unchanged.

    Attributes:
        task: name of the task in tables.
        context: the text that comes first; it may be compressed before the question is known.
        question: text that follows the context.
        answer_prefix: text that opens the answer; it follows the assistant tag of a chat template.
        answers: references; the scorer decides how several references count.
        max_new_tokens: most tokens that the model may generate.
        scorer: name of a task of `TASKS` or in `experiments.benchmarks.scorers.SCORERS`.
        group: name of the group of examples that share a context and are asked in their order; "" is no group.
        labels: values by which tables may be split, for example {"depth": 0.5} or {"difficulty": "hard"}.
        classes: labels to choose from, for the scorers of classification tasks.
        chat: whether a chat template wraps the prompt if the model has a template; some suites leave it out for some tasks.
        stop: texts that end an answer, such as a newline.
        system: text of the system turn; "" leaves the turn to the chat template. Without a template, or where the template
            has no system turn, the text stands above the context.
        target: the right answer in full, behind the prompt; "" for examples of files.
    """

    task: str
    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_new_tokens: int
    scorer: str
    group: str = ""
    labels: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)
    classes: tuple[str, ...] = ()
    chat: bool = True
    stop: tuple[str, ...] = ()
    system: str = ""
    target: str = ""

    @property
    def opening(self) -> str:
        """What a prompt without a system turn begins with: the system text, if there is one, and the context."""
        return f"{self.system}\n\n{self.context}" if self.system else self.context

    @property
    def prompt(self) -> str:
        """The whole prompt without a chat template."""
        return self.opening + self.question + self.answer_prefix


@dataclasses.dataclass(frozen=True)
class Question:
    """A question about a context.

    Attributes:
        question: text that follows the context (begins with a newline).
        answer_prefix: text that opens the answer; prompt = context + question + answer_prefix.
        answers: reference strings that the scorer looks for.
        target: the right answer in full, behind the prefix (without end-of-sequence).
    """

    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    target: str


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

    def samples(self) -> list[Example]:
        """List the questions as examples that share the context."""
        shared = {"task": self.task, "context": self.context, "scorer": self.task, "system": self.system}
        return [Example(**shared, max_new_tokens=self.max_new_tokens, **vars(question)) for question in self.questions]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """The words of a task's prompt, with places for what is drawn.

    Attributes:
        context: instruction and haystack.
        question: text that follows the context.
        prefix: text that opens the answer.
        tokens: most tokens of an answer.
        forms: other texts of the task by name, such as a needle.
    """

    context: str = ""
    question: str = ""
    prefix: str = ""
    tokens: int = 0
    forms: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _descriptions() -> dict[str, dict[str, Any]]:
    sections = tomllib.loads((importlib.resources.files("experiments.tasks") / "tasks.toml").read_text(encoding="utf-8"))
    tasks = ((kind, section, section.pop("tasks", {kind: {}})) for kind, section in sections.items())
    said: dict[str, dict[str, Any]] = {}
    for kind, section, named in tasks:
        for name, own in named.items():
            said[name] = {"kind": kind, **section, **said.get(own.pop("like", ""), {}), **own}
    return said


DESCRIPTIONS = _descriptions()  # by task: its kind, and what tasks.toml says of it
PROMPTS = {
    name: Prompt(**{field: text for field, text in about.items() if field in Prompt.__dataclass_fields__})
    for name, about in DESCRIPTIONS.items()
}


@dataclasses.dataclass(frozen=True)
class Request:
    """The argument of every generator: which document to make.

    Attributes:
        task: registry name.
        rng: the only source of randomness; generating advances it.
        length: limit in tokens on context + questions + generated tokens.
        count_tokens: text -> number of tokens.
        haystack: sentences to hide the needles in (unused by tasks that make their own), or the questions of a file, or
            files of code.
        words: keys and values.
        depth: where the first queried needle goes, 0 (start) to 1 (end); None draws the depth.
        num_questions: number of questions about the context, at least 1; more questions bring more needles.
        index: the index of the file's question to ask, modulo the number of questions; None asks a random question.
    """

    task: str
    rng: random.Random
    length: int
    count_tokens: Callable[[str], int]
    haystack: Haystack | Library | Any
    words: Words
    depth: float | None = None
    num_questions: int = 1
    index: int | None = None

    @property
    def prompt(self) -> Prompt:
        """The words of the task's prompt."""
        return PROMPTS[self.task]

    def question_tokens(self, questions: Sequence[Question]) -> int:
        """Count the tokens of the questions and answer prefixes."""
        return sum(self.count_tokens(q.question + q.answer_prefix) for q in questions)


@dataclasses.dataclass(frozen=True)
class Task:
    """A registry entry.

    Attributes:
        name: registry name.
        generate: `generate(request)` -> `Document`; `TooShort` if the request's length leaves no room for the task.
        score: `score(prediction, answers)` -> float in [0, 1].
        max_new_tokens: most tokens of an answer (`Document.max_new_tokens` may be fewer).
        haystack: kind of haystack in the suite: "noise", "prose", "" (the task makes its own), or "squad" or "hotpotqa"
            (the questions come from a file in this format, which the user brings).
        takes_depth: whether a request can set the depth of the first queried needle.
        max_questions: most questions about a context; None allows as many as fit.
        about: what the task asks for, in a few words.
        load: `load(count_tokens)` -> what the task is made from instead of a haystack; None for tasks without.
        chat: whether a chat template wraps the prompt, see `Example`.
        measures: more scores of an answer by name, which a result has beside `score`.
        in_turns: whether a question may refer to the questions before it, so that several questions about a context are
            asked in turns alone.
        chance: the score of an answer that is drawn among what the text or the question offers.
    """

    name: str
    generate: Callable[[Request], Document]
    score: Callable[[str, Sequence[str]], float]
    max_new_tokens: int
    haystack: str = ""
    takes_depth: bool = True
    max_questions: int | None = None
    about: str = ""
    load: Callable[[Callable[[str], int], str], Any] | None = None
    chat: bool = True
    measures: Mapping[str, Callable[[str, Sequence[str]], float]] = dataclasses.field(default_factory=dict)
    in_turns: bool = False
    chance: float = 0.0

    @property
    def needs_file(self) -> bool:
        """Whether the task has to be given a file ("file:PATH" as its haystack)."""
        return self.haystack not in ("", "noise", "prose")


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not among the ``known`` ones by a ValueError that gives the nearest name."""
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown {kind} {name!r}, did you mean {near!r}? expected one of {', '.join(names)}")
