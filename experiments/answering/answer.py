"""Answer questions about a text under a method, which compresses or indexes the text once, without any question.

Each question is asked of a copy of the cache, in the model's chat template if it has one (`kvjax.answer`).
"""

import dataclasses
import sys

from jsonargparse.typing import PositiveInt

import kvjax
import models
from experiments.answering.logprobs import logprob_lines
from experiments.answering.mesh import make_mesh
from experiments.answering.model import forms_asked
from experiments.answering.texts import read_prompt
from experiments.answering.writing_settings import WritingSettings
from experiments.cli import Job, option
from experiments.records import write_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class AnswerSettings(WritingSettings):
    """What to ask.

    Attributes:
        file: the text, UTF-8 (or UTF-16 with a byte-order mark); - reads standard input
        question: a question about the text; repeatable
    """

    file: str = option(positional=True, metavar="FILE")
    question: tuple[str, ...] = option(repeat=True)
    max_new_tokens: PositiveInt = 64


def _answer(settings: AnswerSettings) -> None:
    """Print an answer a line to standard output, and the costs to standard error."""
    text = read_prompt(None, settings.file)
    where = {"offline": settings.offline, "weight_dtype": settings.weight_dtype, "mesh": make_mesh(settings.mesh)}
    model = models.load(settings.model, settings.dtype, **where)
    if note := forms_asked(model.directory):
        print(f"kvjax: {note}", file=sys.stderr)
    length = len(model.tokenizer.encode(text).ids)
    method = settings.make(length, model.tokenizer, model.config)
    options = {"max_new_tokens": settings.max_new_tokens, "kv_dtype": settings.kv_dtype}
    options |= {"sampler": settings.sampler(), "key": settings.key(), "stop": settings.stop, **settings.scoring()}
    answers = kvjax.answer(model, text, settings.question, method=method, **options)
    for answer in answers:
        print(" ".join(answer.split()))
    if settings.logprobs is not None and answers.scored is not None:
        lines = [line for i, row in enumerate(answers.scored) for line in logprob_lines(model.tokenizer, row, {"answer": i})]
        write_bytes(settings.logprobs, "".join(lines).encode())
    print(f"kvjax: {length} tokens of text; {answers.stats[-1].summary()}", file=sys.stderr)


main = Job(_answer, AnswerSettings, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
