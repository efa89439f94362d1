"""Files of code one after the other, cut at the beginning so that they have a certain number of tokens."""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence

from experiments.tasks.code_files import HEADER, CodeFile, Library
from experiments.tasks.code_names import new_names, renamed, renamed_file

_CHUNK = 16  # lines that are counted together
_SPARE = 1.25  # times the length: renamed text may have fewer tokens


def enough_files(library: Library, order: Sequence[CodeFile], length: int) -> list[CodeFile]:
    """Take files in an order until they have more than `length` tokens.

    Raises:
        ValueError: all files together have fewer.
    """
    taken, total = [], 0
    for file in order:
        taken.append(file)
        total += library.tokens(file)
        if total >= _SPARE * length:
            return taken
    raise ValueError(f"length {length} is too long: the files of code in this split have {total} tokens together")


@dataclasses.dataclass(frozen=True)
class Renaming:
    """What became of some files.

    Attributes:
        files: the files with their new identifiers and paths.
        names: new names by old names; empty if nothing is renamed.
    """

    files: tuple[CodeFile, ...]
    names: Mapping[str, str]

    def text(self, text: str) -> str:
        """Rename a text of the original files."""
        return renamed(text, self.names)


def rename(files: Sequence[CodeFile], rng: random.Random, wanted: bool) -> Renaming:
    """Rename the identifiers of files; if that is not wanted, leave the files as they are."""
    if not wanted:
        return Renaming(tuple(files), {})
    names = new_names(files, rng)
    return Renaming(tuple(renamed_file(file, names, rng) for file in files), names)


class Tail:
    """The end of a text of several files.

    Args:
        files: in the order of the text.
        length: tokens of the longest end that will be asked for.
        count_tokens: text -> number of tokens.
        last: lines of the last file; None takes all.

    Attributes:
        lines: of all files, each below its header.
        offsets: for each file the index of its first line.
    """

    def __init__(
        self, files: Sequence[CodeFile], length: int, count_tokens: Callable[[str], int], last: int | None = None
    ) -> None:
        self._count = count_tokens
        self.lines: list[str] = []
        self.offsets: list[int] = []
        for file in files:
            header = HEADER.format(path=file.path)
            self.lines += [""] * bool(self.lines) + [header]
            self.offsets.append(len(self.lines))
            self.lines += file.lines[: last if file is files[-1] else None]
        self._header_tokens = max(count_tokens(self.lines[offset - 1] + "\n") for offset in self.offsets)
        self._starts, self._tokens = [len(self.lines)], [0]
        while self._starts[-1] > 0 and self._tokens[-1] < length:
            stop = self._starts[-1]
            start = max(0, stop - _CHUNK)
            self._tokens.append(self._tokens[-1] + count_tokens("\n".join(self.lines[start:stop]) + "\n"))
            self._starts.append(start)

    def start(self, tokens: int) -> int:
        """Return the index of the first line of the longest end of at most so many tokens."""
        whole = bisect.bisect_right(self._tokens, tokens) - 1
        start = stop = self._starts[whole]
        while start > 0 and self._tokens[whole] + self._count("\n".join(self.lines[start - 1 : stop]) + "\n") <= tokens:
            start -= 1
        return start

    def text(self, tokens: int) -> str:
        """Return the longest end of at most so many tokens.

        If the end begins inside of a file, the file's header comes first.
        """
        start = self.start(tokens - self._header_tokens)
        index = bisect.bisect_right(self.offsets, start) - 1
        following = self.offsets[index + 1] if index + 1 < len(self.offsets) else len(self.lines) + 2
        if start >= following - 2:  # the blank line before the next file's header, or the header
            return "\n".join(self.lines[following - 1 :])
        return "\n".join([self.lines[self.offsets[index] - 1], *self.lines[start:]])
