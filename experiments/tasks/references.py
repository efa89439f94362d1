"""References of users' files as texts: a value that is no reference is refused, a number becomes its digits."""

from __future__ import annotations

import decimal
import math
import unicodedata
from typing import Any

_ABSENT = ("nan", "NaN", "NaT", "<NA>")  # what tables write for an absent value
_EXACT = 2**53  # larger whole numbers lose digits as a float


def reference_text(value: Any, *, decimals: bool = False) -> str:
    """Return a reference as text.

    Args:
        value: a text or a number. A whole number in a float is written without a point, and no number with an exponent.
        decimals: whether a whole number in a float keeps its point, for scorers that tell 7 from 7.0.

    Raises:
        ValueError: the value is blank, an absent value of a table, a number that lost digits, or neither text nor number.
    """
    if isinstance(value, str):
        check_unicode(value)
        if value.strip() in _ABSENT:
            raise ValueError(f"expected a reference, got {value!r}, which tables write for an absent value")
        if not any(map(_is_visible, value)):
            raise ValueError(f"expected a reference, got {value[:40]!r}, which every answer contains")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"expected a text or a number as reference, got {type(value).__name__} {value!r:.40}")
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ValueError(f"expected a reference, got the number {value}")
    if not value.is_integer():
        return format(decimal.Decimal(repr(value)), "f")
    if abs(value) > _EXACT:
        raise ValueError(
            f"expected a whole number of at most 2**53 in a float, got {value!r}, which lost digits; write it without a point"
        )
    return f"{int(value)}.0" if decimals else str(int(value))


def check_unicode(text: str) -> None:
    """Refuse a text with half of a surrogate pair, which JSON can hold and neither a tokenizer nor a file takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected Unicode text, got half of a surrogate pair at character {error.start}") from error


def _is_visible(character: str) -> bool:
    """Tell whether a character is neither white space nor an invisible mark."""
    return not character.isspace() and unicodedata.category(character) not in ("Cc", "Cf", "Cn", "Cs", "Zl", "Zp", "Zs")
