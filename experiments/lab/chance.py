"""What a task gives for no work: `python -m experiments.lab.chance --config docs/settings/qwen-16k.yaml`.

Scores an empty answer and the best constant answer on the samples of the settings' tasks, without a model. The constant
answers that are tried are the references of the samples, so on a task whose answers all differ the best has one sample right.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Sequence

import numpy as np

import models
from experiments.benchmarks import Example, examples, score
from experiments.cli import Job
from experiments.evaluation.settings import EvaluationSettings
from experiments.records import markdown_rows
from experiments.tasks import expand

_SHOWN = 30  # letters of an answer in the table


@dataclasses.dataclass(frozen=True)
class TokenizerOption:
    """How tokens are counted, which decides how much text fits a length.

    Attributes:
        tokenizer: folder with a tokenizer.json (default: the tokenizer that ships)
    """

    tokenizer: pathlib.Path | None = None


def chance(asked: Sequence[Example]) -> tuple[float, float, str]:
    """Score an empty answer and the best constant answer, in percent; also return the constant answer.

    Args:
        asked: examples of one task. Every reference is tried as the constant answer, and all references of an example
            together.
    """

    def mean(answer: str) -> float:
        return 100 * float(np.mean([score(example, answer) for example in asked]))

    candidates = dict.fromkeys(answer for x in asked for answer in (*x.answers, ", ".join(x.answers)))
    best = max(candidates, key=mean)
    return mean(""), mean(best), best


def _table(settings: EvaluationSettings, option: TokenizerOption) -> None:
    tokenizer = models.load_tokenizer(option.tokenizer or models.builtin_directory())
    rows = [("task", "length", "an empty answer", "the best constant answer", "which is")]
    for length, name in itertools.product(settings.lengths, expand(settings.generated)):
        asked = examples(
            name,
            length=length,
            count=settings.samples,
            seed=settings.seed,
            count_tokens=lambda text: len(tokenizer.encode(text).ids),
            haystack=settings.haystack_of(name),
        )
        empty, constant, answer = chance(asked)
        brief = answer if len(answer) <= _SHOWN else answer[:_SHOWN] + "..."
        rows.append((f"`{name}`", f"{length:,}", f"{empty:.1f}", f"{constant:.1f}", f"`{brief}`"))
    print("\n".join(markdown_rows(rows)))


main = Job(_table, EvaluationSettings, TokenizerOption)


if __name__ == "__main__":
    sys.exit(main())
