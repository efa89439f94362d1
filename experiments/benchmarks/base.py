"""An example of any suite: the prompt, the references, and the name of its scorer."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping


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
        scorer: name in `experiments.benchmarks.scorers.SCORERS`.
        group: name of the group of examples that share a context and are asked in their order; "" is no group.
        labels: values by which tables may be split, for example {"depth": 0.5} or {"difficulty": "hard"}.
        classes: labels to choose from, for the scorers of classification tasks.
        chat: whether a chat template wraps the prompt if the model has a template; some suites leave it out for some tasks.
        stop: texts that end an answer, such as a newline.
        system: text of the system turn; "" leaves the turn to the chat template. Without a template, or where the template
            has no system turn, the text stands above the context.
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

    @property
    def prompt(self) -> str:
        """The whole prompt without a chat template."""
        return self.opening + self.question + self.answer_prefix

    @property
    def opening(self) -> str:
        """What a prompt without a system turn begins with: the system text, if there is one, and the context."""
        return f"{self.system}\n\n{self.context}" if self.system else self.context


def check_name(kind: str, name: str, known: Iterable[str]) -> None:
    """Refuse a name that is not among the ``known`` ones by a ValueError that gives the nearest name."""
    names = list(known)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown {kind} {name!r}, did you mean {near!r}? expected one of {', '.join(names)}")
