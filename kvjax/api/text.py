"""Generated tokens as rows of ids, with log-probabilities, and as text, at the end or while they are generated."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from kvjax.decoding.log_probs import LogProbs
from kvjax.protocol.fields import shown
from kvjax.protocol.typing import not_none

_REPLACED = "\ufffd"  # what bytes that are no character decode to
_LEFT = 3  # the most tokens that a character can still need: a character has at most 4 bytes, a token at least 1


def rows_of(tokens: Array, num_tokens: Array) -> list[list[int]]:
    """List the token ids of each row of ``tokens`` int32 [B, N] without padding; ``num_tokens`` is int32 [B]."""
    counts = np.asarray(num_tokens).tolist()
    return [row[:count].tolist() for row, count in zip(np.asarray(tokens), counts, strict=True)]


class ScoredToken(NamedTuple):
    """A generated token and its log-probabilities in nats, as numbers of Python; see `kvjax.decoding.log_probs.LogProbs`."""

    token: int
    logprob: float  # under the model's distribution
    sampled_logprob: float  # under the distribution that it was drawn from; 0 where decoding is greedy
    top: tuple[tuple[int, float], ...]  # the model's likeliest tokens with their log-probabilities, the likeliest first


def scored_rows(tokens: Array, num_tokens: Array, logprobs: LogProbs | None) -> list[list[ScoredToken]]:
    """List the tokens of each row of ``tokens`` int32 [B, N] without padding, with their log-probabilities."""
    made = jax.tree.map(np.asarray, not_none("logprobs", logprobs))

    def scored(row: int, place: int, token: int) -> ScoredToken:
        top = ()
        if made.top is not None:
            top = tuple(zip(made.top_tokens[row, place].tolist(), made.top[row, place].tolist(), strict=True))
        return ScoredToken(token, float(made.model[row, place]), float(made.sampled[row, place]), top)

    rows = rows_of(tokens, num_tokens)
    return [[scored(row, place, token) for place, token in enumerate(ids)] for row, ids in enumerate(rows)]


def texts_of(tokenizer: Any, rows: Sequence[Sequence[int]], ends: Array, stop: str | Sequence[str] = ()) -> list[str]:
    """Decode rows of token ids, without the ids in ``ends`` int32 [E], up to the first string of ``stop``."""
    left_out, stops = set(np.asarray(ends).reshape(-1).tolist()), stop_strings(stop, tokenizer)
    texts = [tokenizer.decode([token for token in row if token not in left_out]) for row in rows]
    return [text if (at := stop_in(text, stops)) is None else text[:at] for text in texts]


def stop_strings(stop: str | Sequence[str], tokenizer: Any) -> tuple[str, ...]:
    """Return the strings that end a text; refuse others, and strings without a tokenizer, with a ValueError."""
    stops: tuple[Any, ...] = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else (None,)
    if not all(isinstance(one, str) and one for one in stops):
        raise ValueError(f"stop must be a text, or a list of texts, none of them empty, got {shown(stop)}")
    if stops and tokenizer is None:
        raise ValueError(f"stop={shown(stop)} needs a tokenizer: stop strings are looked for in text")
    return stops


def stop_in(text: str, stops: Sequence[str]) -> int | None:
    """Find where the string of ``stops`` begins that is complete first; None if there is none."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def until_stop(tokenizer: Any, ids: Sequence[int], stops: Sequence[str]) -> int:
    """Count the first of some token ids whose text has a string of ``stops``; all if none has."""
    size = len(ids)
    while size and stop_in(tokenizer.decode(ids[: size - 1]), stops) is not None:
        size -= 1
    return size


class GrowingText:
    """The text of one row while it is generated, in pieces that are final.

    The last tokens of a row may be the first bytes of a character. Byte-level tokenizers decode them to U+FFFD. Byte-fallback
    tokenizers (Llama 2, Mistral, Yi) then decode whole characters before them to U+FFFD too. So a piece ends where all
    tokens up to there decode without such a character at the end.

    Args:
        tokenizer: has ``decode(ids)``.
        stops: strings, before the first of which the text ends; see `stop_in`.

    Attributes:
        ended: whether one of them has come.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._held, self.ended = "", False  # what may be the beginning of a stop string
        self._ids: list[int] = []
        self._shown, self._whole = "", 0  # the text so far, and the number of ids that it consists of

    def add(self, ids: Sequence[int], last: bool = False) -> str:
        """Add token ids; return the new piece of text, which may be empty.

        Args:
            ids: the next tokens of the row.
            last: whether the row ends with them, so that an incomplete character or stop string is not waited for.
        """
        if self.ended:
            return ""
        text = self._held + self._whole_characters(ids, last)
        if (at := stop_in(text, self._stops)) is not None:
            self.ended = True
            return text[:at]
        begun = [size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
        shown = len(text) - (0 if last else max(begun, default=0))
        self._held = text[shown:]
        return text[:shown]

    def _whole_characters(self, ids: Sequence[int], last: bool) -> str:
        self._ids += ids
        end, text = len(self._ids), self._tokenizer.decode(self._ids)
        while not last and text.endswith(_REPLACED):
            end -= 1
            if end <= self._whole or end < len(self._ids) - _LEFT:
                return ""
            text = self._tokenizer.decode(self._ids[:end])
        if not text.startswith(self._shown):  # bytes of no character follow characters that were shown: go on behind them
            self._ids, end = self._ids[self._whole :], end - self._whole
            self._shown, text = "", self._tokenizer.decode(self._ids[:end])
        piece = text[len(self._shown) :]
        self._shown, self._whole = text, end
        return piece
