"""One example of any suite: what a model is shown, what it may answer, and how that is scored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Example:
    """A context, a question about it and its references; prompt = context + question + answer_prefix.

    The names are those of the tables that kvpress users have, so that their files can be read as they are.

    Attributes:
        task: name of the task in tables.
        context: what comes first and may be compressed before the question is known.
        question: text that follows the context.
        answer_prefix: text that opens the answer; it comes behind a chat template's assistant tag.
        answers: references; what several mean is the scorer's business.
        max_new_tokens: how many tokens the model may generate.
        scorer: name in `experiments.suites.scorers.SCORERS`.
        group: examples of equal group, "" apart, share their context, in the order in which they are asked.
        labels: what tables may be split by, for example {"depth": 0.5} or {"difficulty": "hard"}.
        classes: labels to choose from, for the scorers of classification tasks.
        chat: whether a chat template, if there is one, wraps the prompt; some suites leave it out for some tasks.
        stop: texts that end an answer, such as a newline.
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

    @property
    def prompt(self) -> str:
        """The whole prompt without a chat template."""
        return self.context + self.question + self.answer_prefix
