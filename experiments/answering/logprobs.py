"""Log-probabilities of generated tokens as JSON lines, a line for each token."""

import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvjax.api.text import ScoredToken


def logprob_lines(
    tokenizer: Any, tokens: Sequence[ScoredToken], about: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[str]:
    """Yield a JSON line for each token of a row, which begins with the fields of ``about``.

    ``logprob`` is under the model's distribution, and so is ``top``, the likeliest tokens; ``sampled_logprob`` is under the
    distribution that the token was drawn from. ``text`` is the token's own text: a part of a character decodes to U+FFFD.
    """
    for one in tokens:
        top = [{"token": token, "text": tokenizer.decode([token]), "logprob": value} for token, value in one.top]
        line = {**about, "token": one.token, "text": tokenizer.decode([one.token]), "logprob": one.logprob}
        line |= {"sampled_logprob": one.sampled_logprob} | ({"top": top} if top else {})
        yield json.dumps(line, ensure_ascii=False) + "\n"
