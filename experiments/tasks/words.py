"""Keys and values: needle words, numbers, uuids and variable names, disjoint between training and evaluation."""

import functools
import importlib.util
import pathlib
import random
import string
import uuid
import zlib
from collections.abc import Callable

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


@functools.cache
def _word_list(kind: str) -> tuple[str, ...]:
    # The lists are read as data, because importing the package would also import its sentence generator.
    (folder,) = importlib.util.find_spec("wonderwords").submodule_search_locations
    path = pathlib.Path(folder) / "assets" / f"{kind}list.txt"
    words = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    return tuple(sorted(word for word in words if word and " " not in word and word.isascii()))


@functools.cache
def every_word() -> tuple[str, ...]:
    """List all nouns, adjectives and verbs of both splits, sorted, for tasks whose words are no keys or values (cwe)."""
    return tuple(sorted({word for kind in ("noun", "adjective", "verb") for word in _word_list(kind)}))


@functools.cache
def _words_of(kind: str, split: str) -> tuple[str, ...]:
    return tuple(word for word in _word_list(kind) if held_out(word) == (split == "eval"))


class Words:
    """The source of keys and values of one split.

    Args:
        split: "train" or "eval"; the two never share a noun, an adjective, a number, a uuid or a variable.

    Raises:
        ValueError: unknown split.
    """

    def __init__(self, split: str) -> None:
        check_split(split)
        self._held_out = split == "eval"
        self.adjectives, self.nouns = _words_of("adjective", split), _words_of("noun", split)

    @functools.cached_property
    def plain_nouns(self) -> list[str]:
        """The nouns that are made of letters alone."""
        return [noun for noun in self.nouns if noun.isalpha()]

    def word(self, rng: random.Random) -> str:
        """Draw an `adjective-noun` key (RULER's needle words)."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def number(self, rng: random.Random, digits: int = 7) -> str:
        """Draw a decimal number of exactly `digits` digits without leading zero (RULER: 7)."""
        return self._of_split(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))

    def digit_string(self, rng: random.Random, digits: int) -> str:
        """Draw a string of `digits` independent digits (InfiniteBench passkey: 5)."""
        return self._of_split(lambda: f"{rng.randrange(10**digits):0{digits}d}")

    def repeated_digit_string(self, rng: random.Random) -> str:
        """Draw ten digits as InfiniteBench's number_string does: five digits, and five times a digit doubled in place."""

        def draw() -> str:
            keys = [str(rng.randint(0, 9)) for _ in range(5)]
            for k in range(5):
                position = rng.randint(0, 5 + k - 1)
                keys.insert(position, keys[position])
            return "".join(keys)

        return self._of_split(draw)

    def uuid(self, rng: random.Random) -> str:
        """Draw a random version-4 uuid in its usual 36-character form."""
        return self._of_split(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))

    def variable(self, rng: random.Random, letters: int = 5) -> str:
        """Draw a variable name of capital letters (RULER vt: 5 letters; its one-shot example: 3 letters)."""
        return self._of_split(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))

    def letters(self, rng: random.Random, count: int) -> str:
        """Draw a string of `count` small letters (RULER fwe: 6)."""
        return self._of_split(lambda: "".join(rng.choices(string.ascii_lowercase, k=count)))

    def _of_split(self, draw: Callable[[], str]) -> str:
        """Draw until the text belongs to this split."""
        while held_out(text := draw()) != self._held_out:
            pass
        return text

    def distinct(self, kind: str, count: int, rng: random.Random) -> list[str]:
        """Draw `count` different strings of one kind.

        Args:
            kind: "words", "numbers" or "uuids".
        """
        draws = {"words": self.word, "numbers": self.number, "uuids": self.uuid}
        return distinct(lambda: draws[kind](rng), count)


def distinct[Drawn](draw: Callable[[], Drawn], count: int) -> list[Drawn]:
    """Draw until there are ``count`` different values; return them in the order in which they came."""
    seen: dict[Drawn, None] = {}
    while len(seen) < count:
        seen[draw()] = None
    return list(seen)
