"""Texts of users: from files of any encoding that says what it is, as references, and as tokens with one begin-of-text token.

A value that is no reference is refused, and a number becomes its digits.
"""

import codecs
import decimal
import math
import os
import pathlib
import unicodedata
from typing import Any

from tokenizers import Tokenizer

# A longer mark may begin with a shorter one.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_ABSENT = ("nan", "NaN", "NaT", "<NA>")  # what tables write for an absent value
_EXACT = 2**53  # larger whole numbers lose digits as a float


def read_text(path: str | os.PathLike) -> str:
    """Read a text file: UTF-8, or UTF-8, UTF-16 or UTF-32 with a byte-order mark, which is no part of the text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has another encoding, such as Latin-1, or is no text.
    """
    return decode_text(pathlib.Path(path).read_bytes(), str(path))


def decode_text(data: bytes, where: str) -> str:
    """Decode the bytes of a text as `read_text` does; lines end in a line feed.

    Args:
        data: the bytes.
        where: name of the text, for the error.
    """
    encoding = next((name for mark, name in _MARKS.items() if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{where} is not UTF-8 text, expected UTF-8, or UTF-16 with a byte-order mark; got {error} (line {line}); for a "
            "file in Latin-1: iconv -f latin1 -t utf-8 FILE > NEW"
        ) from error
    if "\0" in text:
        raise ValueError(f"{where} is not text: got a NUL character, as in UTF-16 without a byte-order mark, expected UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def opening_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that a tokenizer puts before every text: begin-of-text, or several; none for many models."""
    plain, whole = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    starts = range(len(whole) - len(plain) + 1)
    return next((whole[:at] for at in starts if whole[at : at + len(plain)] == plain), [])


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a prompt, which begins with the tokenizer's opening once.

    A rendered chat template gets no second opening. No token follows the prompt, even if the tokenizer ends texts with an
    end-of-text token: the model goes on where the prompt ends.

    Raises:
        ValueError: the text has half of a surrogate pair.
    """
    check_unicode(text)
    ids, opening = tokenizer.encode(text, add_special_tokens=False).ids, opening_ids(tokenizer)
    return ids if ids[: len(opening)] == opening else opening + ids


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
