"""Texts of users: from files of any encoding that says what it is, and as tokens with one begin-of-text token."""

from __future__ import annotations

import codecs
import os
import pathlib

from tokenizers import Tokenizer

from experiments.tasks.references import check_unicode

# A longer mark may begin with a shorter one.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


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
