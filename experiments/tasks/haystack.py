"""The texts in which needles are hidden: a repeated sentence, prose, or a file."""

import bisect
import functools
import gzip
import itertools
import pathlib
import random
import re
from collections.abc import Callable, Sequence

from experiments.tasks.code_files import KIND, code_pieces, code_text
from experiments.tasks.texts import read_text

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
LONGEST_SENTENCE = 400  # characters
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')]*\s+(?=[\"'(]?[A-Z])")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|cf|vs|Mr|Mrs|Dr|St|No|Vol)|\b[A-Z])\.$")


def split_sentences(text: str) -> list[str]:
    """Split running text into sentences (full stop, question or exclamation mark before a capital letter).

    Args:
        text: text whose line breaks mean nothing.

    Returns:
        Sentences without surrounding white space, of at most `LONGEST_SENTENCE` characters (a longer sentence is cut at a
        space).
    """
    pieces: list[str] = []
    start = 0
    flat = " ".join(text.split())
    for match in _SENTENCE_END.finditer(flat):
        piece = flat[start : match.end()].strip()
        if _ABBREVIATION.search(piece):
            continue
        pieces.append(piece)
        start = match.end()
    pieces.append(flat[start:].strip())
    sentences: list[str] = []
    for piece in pieces:
        while len(piece) > LONGEST_SENTENCE:
            cut = piece.rfind(" ", 1, LONGEST_SENTENCE)
            cut = LONGEST_SENTENCE if cut < 0 else cut
            sentences.append(piece[:cut].strip())
            piece = piece[cut:].strip()
        if piece:
            sentences.append(piece)
    return sentences


@functools.cache
def prose_text() -> str:
    """Return English prose, about 290,000 characters: paragraphs of the documentation of Python 3.12.3.

    It is a file here because patch releases of Python differ in it; a seed gives the same contexts everywhere. Copyright
    Python Software Foundation, under `prose.LICENSE.txt`. Of `pydoc_data.topics`, sorted by name, code, grammar, tables,
    headings, short paragraphs and markup are left out.
    """
    return gzip.decompress(pathlib.Path(__file__).with_name("prose.txt.gz").read_bytes()).decode()


def source_text(kind: str) -> str:
    """Return the text of a kind of haystack.

    Args:
        kind: "prose" or "file:PATH".

    Raises:
        ValueError: unknown kind, or a file in an encoding that it does not name, see `experiments.tasks.texts`.
    """
    if kind == "prose":
        return prose_text()
    if kind.startswith("file:"):
        path = pathlib.Path(kind.removeprefix("file:"))
        if not path.is_file():
            raise FileNotFoundError(f"haystack file not found: {path}")
        return read_text(path)
    raise ValueError(f"unknown haystack {kind!r}, expected 'noise', 'prose', 'code' or 'file:PATH'")


def held_out_span(sentences: Sequence[str]) -> list[str]:
    """Return the end of a source, which was held out of the training of the shipped models.

    Args:
        sentences: all sentences of a source, in order.
    """
    total = sum(len(s) for s in sentences)
    goal = total - min(0.3 * total, max(0.05 * total, 120_000))
    ends = list(itertools.accumulate(len(s) for s in sentences))
    cut = bisect.bisect_left(ends, goal)
    return list(sentences[cut:])


@functools.lru_cache(2)
def _sentences(text: str) -> list[str]:
    return split_sentences(text)


def held_out_text(kind: str) -> str:
    """Return the held-out span of a kind of haystack as running text; see `source_text` and `held_out_span`."""
    if kind == KIND:
        return code_text()
    return " ".join(held_out_span(_sentences(source_text(kind))))


class Haystack:
    """Sentences with their token counts, so that bisection finds a span of a given number of tokens.

    Args:
        kind: "noise", "prose", "code" or "file:PATH".
        sentences: the sentences, in order; pieces of some lines for code.
        count_tokens: text -> number of tokens; called once for each sentence, when the haystack is made.

    Attributes:
        separator: the suites' separator of sentences: a newline for noise and code, a space otherwise.
    """

    def __init__(self, kind: str, sentences: Sequence[str], count_tokens: Callable[[str], int]) -> None:
        if not sentences:
            raise ValueError(f"haystack {kind!r} holds no sentence")
        self.separator = "\n" if kind in ("noise", KIND) else " "
        self.sentences = tuple(sentences)
        counts = (count_tokens(self.separator + sentence) for sentence in self.sentences)
        self._ends = [0, *itertools.accumulate(counts)]

    def span(self, rng: random.Random, tokens: int) -> list[str]:
        """Draw consecutive sentences of at most `tokens` tokens from a random start; the text repeats after its end.

        Args:
            tokens: upper limit in tokens.
        """
        total, size = self._ends[-1], len(self.sentences)
        # Start at a sentence from which the span reaches no end of the text, if there is one.
        latest = bisect.bisect_right(self._ends, max(0, total - tokens)) - 1
        start = rng.randrange(max(1, min(latest + 1, size))) if tokens < total else rng.randrange(size)
        rounds, rest = divmod(max(0, tokens) + self._ends[start], total)
        stop = rounds * size + bisect.bisect_right(self._ends, rest) - 1
        return [self.sentences[i % size] for i in range(start, stop)]


def load_haystack(kind: str, count_tokens: Callable[[str], int]) -> Haystack:
    """Build a haystack.

    Args:
        kind: "noise", "prose" (default of the suites here), "code" (files of Python's standard library, see
            `experiments.tasks.code_files`) or "file:PATH".
    """
    if kind == "noise":
        return Haystack(kind, [NOISE], count_tokens)
    if kind == KIND:
        return Haystack(kind, code_pieces(), count_tokens)
    return Haystack(kind, held_out_span(_sentences(source_text(kind))), count_tokens)
