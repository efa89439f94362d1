"""Answer questions about a text under a method, which compresses or indexes the text once, without any question.

Each question is asked of a copy of the cache, in the model's chat template if it has one (`kvjax.answer`).
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from jsonargparse.typing import PositiveInt

import kvjax
import models
from experiments.answering.model import ModelSettings
from experiments.answering.presets import budget_tokens, read_files, read_knobs
from experiments.answering.texts import read_prompt
from experiments.cli import Job, option
from kvjax import registry
from kvjax.cache.quantised import KV_DTYPES
from kvjax.protocol.method import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings(ModelSettings):
    """What to ask, and how.

    Attributes:
        file: the text, UTF-8 (or UTF-16 with a byte-order mark); - reads standard input
        question: a question about the text; repeatable
        method: see kvjax ls; or package.module:Class; or a wrapper such as twilight(quest)
        set: a knob of the method; a budget may be a share of the text such as 1/8; repeatable
        max_new_tokens: most tokens of an answer
        kv_dtype: store keys and values as codes: int8, float8_e4m3fn, k8v4 or int4 (default: in the dtype of computation)

    Raises:
        ValueError: an unknown method or knob.
    """

    file: str = option(positional=True, metavar="FILE")
    question: tuple[str, ...] = option(repeat=True)
    method: str = "full"
    set: tuple[str, ...] = option((), repeat=True, metavar="KNOB=VALUE")
    max_new_tokens: PositiveInt = 64
    kv_dtype: str | None = option(None, choices=tuple(KV_DTYPES))

    def __post_init__(self) -> None:
        self.made(1 << 20, None, None)  # refuses unknown names before a model is loaded

    def made(self, length: int, tokenizer: Any, config: Any) -> Method:
        """Make the method for a text of some tokens."""
        name, knobs = registry.parse_method(self.method, read_knobs)
        knobs |= read_knobs(name, self.set)
        if "budget" in knobs:
            knobs["budget"] = budget_tokens(knobs["budget"], length)
        if config is None:
            return registry.make(name, **{knob: x for knob, x in knobs.items() if knob not in ("scores", "pattern")})
        return registry.make(name, tokenizer, config.vocab_size, **read_files(knobs, config))


def _answer(settings: AnswerSettings) -> None:
    """Print an answer a line to standard output, and the costs to standard error."""
    text = read_prompt(None, settings.file)
    model = models.load(settings.model, settings.dtype, offline=settings.offline, weight_dtype=settings.weight_dtype)
    length = len(model.tokenizer.encode(text).ids)
    method = settings.made(length, model.tokenizer, model.config)
    options = {"max_new_tokens": settings.max_new_tokens, "kv_dtype": settings.kv_dtype}
    answers = kvjax.answer(model, text, settings.question, method=method, **options)
    for answer in answers:
        print(" ".join(answer.split()))
    print(f"kvjax: {length} tokens of text; {answers.stats[-1].summary()}", file=sys.stderr)


main = Job(_answer, AnswerSettings, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
