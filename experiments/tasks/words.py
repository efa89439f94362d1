"""Keys and values: needle words, numbers, uuids and variable names that the shipped models were not trained on."""

import functools
import importlib.util
import pathlib
import random
import string
import uuid
import zlib
from collections.abc import Callable


def held_out(text: str) -> bool:
    """Tell whether a key word or a value was held out of the training of the shipped models.

    The string alone decides, by its CRC-32, and a tenth of all strings were held out. So training and evaluation share no key
    and no value, whatever their seeds are.

    Args:
        text: the word, number, uuid or variable name.
    """
    return zlib.crc32(text.encode()) % 10 == 0


@functools.cache
def _word_list(kind: str) -> tuple[str, ...]:
    # The lists are read as data, because importing the package would also import its sentence generator.
    (folder,) = importlib.util.find_spec("wonderwords").submodule_search_locations
    path = pathlib.Path(folder) / "assets" / f"{kind}list.txt"
    words = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
    return tuple(sorted(word for word in words if word and " " not in word and word.isascii()))


@functools.cache
def every_word() -> tuple[str, ...]:
    """List all nouns, adjectives and verbs, sorted, for tasks whose words are no keys or values (cwe)."""
    return tuple(sorted({word for kind in ("noun", "adjective", "verb") for word in _word_list(kind)}))


@functools.cache
def _words_of(kind: str) -> tuple[str, ...]:
    return tuple(filter(held_out, _word_list(kind)))


class Words:
    """The source of keys and values."""

    def __init__(self) -> None:
        self.adjectives, self.nouns = _words_of("adjective"), _words_of("noun")

    @functools.cached_property
    def plain_nouns(self) -> list[str]:
        """The nouns that are made of letters alone."""
        return [noun for noun in self.nouns if noun.isalpha()]

    def word(self, rng: random.Random) -> str:
        """Draw an `adjective-noun` key (RULER's needle words)."""
        return f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"

    def number(self, rng: random.Random, digits: int = 7) -> str:
        """Draw a decimal number of exactly `digits` digits without leading zero (RULER: 7)."""
        return _held_out_text(lambda: str(rng.randrange(10 ** (digits - 1), 10**digits)))

    def digit_string(self, rng: random.Random, digits: int) -> str:
        """Draw a string of `digits` independent digits (InfiniteBench passkey: 5)."""
        return _held_out_text(lambda: f"{rng.randrange(10**digits):0{digits}d}")

    def repeated_digit_string(self, rng: random.Random) -> str:
        """Draw ten digits as InfiniteBench's number_string does: five digits, and five times a digit doubled in place."""

        def draw() -> str:
            keys = [str(rng.randint(0, 9)) for _ in range(5)]
            for k in range(5):
                position = rng.randint(0, 5 + k - 1)
                keys.insert(position, keys[position])
            return "".join(keys)

        return _held_out_text(draw)

    def uuid(self, rng: random.Random) -> str:
        """Draw a random version-4 uuid in its usual 36-character form."""
        return _held_out_text(lambda: str(uuid.UUID(int=rng.getrandbits(128), version=4)))

    def variable(self, rng: random.Random, letters: int = 5) -> str:
        """Draw a variable name of capital letters (RULER vt: 5 letters; its one-shot example: 3 letters)."""
        return _held_out_text(lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))

    def letters(self, rng: random.Random, count: int) -> str:
        """Draw a string of `count` small letters (RULER fwe: 6)."""
        return _held_out_text(lambda: "".join(rng.choices(string.ascii_lowercase, k=count)))

    def distinct(self, kind: str, count: int, rng: random.Random) -> list[str]:
        """Draw `count` different strings of one kind.

        Args:
            kind: "words", "numbers" or "uuids".
        """
        draws = {"words": self.word, "numbers": self.number, "uuids": self.uuid}
        return distinct(lambda: draws[kind](rng), count)


def _held_out_text(draw: Callable[[], str]) -> str:
    while not held_out(text := draw()):
        pass
    return text


def distinct[Drawn](draw: Callable[[], Drawn], count: int) -> list[Drawn]:
    """Draw until there are ``count`` different values; return them in the order in which they came."""
    seen: dict[Drawn, None] = {}
    while len(seen) < count:
        seen[draw()] = None
    return list(seen)
