"""Random texts of the letters at which readers of files, tokenizers and paths go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Separators that only some readers take for line ends, marks of csv, JSON and templates, letters of one to four bytes.
_LETTERS = (
    "abcdefgh XYZ 0123456789", "\n\t ,;|\"'`\\/", "{}[]()<>%$#*?!~:=&+-_.@^", "éüßøÅñ", "日本語中文，。「」", "עבריתعربي",
    "😀👩\u200d👩\u200d👧🇩🇪", "e\u0301a\u0308", "\u2028\u2029\x85\x0b\x0c\x1c\x1e", "\u00a0\u200b\u202e\ufeff", "ﬁⅫ①ıİſ",
)  # fmt: skip
_PIECES = ("{context}", "$$MASK$$", "<s>", "</s>", "\\n", "nan", "''", '""', "[1]", "a,b", "%s", "${HOME}", "\r\n")


def one(rng: np.random.Generator, options: Sequence[Any]) -> Any:
    """Choose one of a sequence."""
    return options[int(rng.integers(len(options)))]


def random_text(rng: np.random.Generator, most: int = 40, plain: float = 0.4) -> str:
    """Draw a text of at least one character.

    Args:
        rng: source of randomness.
        most: most pieces.
        plain: share of the pieces that are ASCII letters.
    """
    made = []
    for _ in range(int(rng.integers(1, most + 1))):
        if rng.random() < plain:
            made.append(one(rng, _LETTERS[0]))
        elif rng.random() < 0.1:
            made.append(one(rng, _PIECES))
        else:
            made.append(one(rng, one(rng, _LETTERS)))
    return "".join(made)


def visible_text(rng: np.random.Generator, most: int = 12) -> str:
    """Draw a text that a reference can be: it has a letter and is no list, no number and no word for an absent value."""
    return f"a{random_text(rng, most)}z" if rng.random() < 0.5 else f"w{int(rng.integers(10**6))}"
