"""The two splits of keys, values and texts, so that training and evaluation share no key, value or text."""

from __future__ import annotations

import zlib

SPLITS = ("train", "eval")


def held_out(text: str) -> bool:
    """Tell whether a key word or a value belongs to the evaluation split.

    The string alone decides, by its CRC-32, and a tenth of all strings belong to evaluation. So training and evaluation never
    share a key or a value, whatever their seeds are.

    Args:
        text: the word, number, uuid or variable name.
    """
    return zlib.crc32(text.encode()) % 10 == 0


def check_split(split: str) -> None:
    """Refuse a split other than "train" and "eval"."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}, expected one of {SPLITS}")
