"""The sources of the running Python's standard library: the text that the tasks of code and the haystack "code" read.

Every machine that runs kvjax has these files, so nothing is downloaded and nothing is copied. Another version of Python has
other files. So a result of these tasks records `library_origin`.

Tests, files without a function, files that a build wrote, and packages that some distributions leave out are skipped.
"""

import ast
import bisect
import dataclasses
import functools
import hashlib
import pathlib
import platform
import sysconfig
import zlib
from collections.abc import Callable, Sequence
from typing import Any

KIND = "code"  # the haystack of these files
RENAMED = "_renamed"  # how the name of a task ends whose files get new names
HEADER = "# file: {path}"
PIECE_LINES = 8  # the most lines of a piece of a haystack
_SHORTEST = 20  # lines of a file
_CHUNK = 16  # lines that are counted together
_SPARE = 1.25  # times the length: renamed text may have fewer tokens
# Tests, data, and what distributions of Python leave out or put into packages of their own.
_SKIPPED = frozenset(
    ("test", "tests", "idlelib", "tkinter", "turtledemo", "turtle", "ensurepip", "lib2to3", "distutils", "pydoc_data",
     "encodings", "site-packages", "dist-packages", "__pycache__", "lib-dynload", "__phello__", "venv")
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class CodeFile:
    """A file of Python code.

    Attributes:
        path: below the standard library's folder, with slashes.
        text: the code; ends with a newline.
    """

    path: str
    text: str

    @property
    def package(self) -> str:
        """The module or package of the standard library that the file belongs to."""
        return self.path.partition("/")[0].removesuffix(".py")

    @functools.cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines, without the newlines; line 1 of the syntax tree is item 0."""
        return tuple(self.text.removesuffix("\n").split("\n"))

    @functools.cached_property
    def tree(self) -> ast.Module:
        """The syntax tree."""
        return ast.parse(self.text)


@functools.cache
def code_files() -> tuple[CodeFile, ...]:
    """Read about half of the standard library's files, sorted by path: the name of a module or package decides.

    Raises:
        FileNotFoundError: this Python has no sources of its standard library.
    """
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    files = []
    for parts, path in sorted((path.parts[len(root.parts) :], path) for path in root.rglob("*.py")):
        name = parts[0].removesuffix(".py")
        # Folders such as config-3.13-x86_64-linux-gnu hold what a build wrote.
        skipped = _SKIPPED & {name, *parts[:-1]} or name.startswith("_sysconfigdata") or "-" in name
        if skipped or zlib.crc32(name.encode()) % 2:
            continue
        if (file := _read(path, "/".join(parts))) is not None:
            files.append(file)
    if not files:
        raise FileNotFoundError(f"expected the sources of Python's standard library in {root}, got no file of them")
    return tuple(files)


def _read(path: pathlib.Path, name: str) -> CodeFile | None:
    """Return the file, or None if it is short, not in UTF-8, no code of this version of Python, or without a function."""
    try:
        text = path.read_text(encoding="utf-8").replace("\f", "")
        file = CodeFile(name, text.rstrip() + "\n")
        functions = any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) for node in ast.walk(file.tree))
        return file if len(file.lines) >= _SHORTEST and functions else None
    except (UnicodeDecodeError, SyntaxError):
        return None


@functools.cache
def library_origin() -> dict[str, Any]:
    """Describe the text that evaluation reads, for a result's record.

    Returns:
        {"python": version, "files": number of files, "sha256": digest of their paths and texts}.
    """
    files, digest = code_files(), hashlib.sha256()
    for file in files:
        digest.update(f"{file.path}\0{file.text}\0".encode())
    return {"python": platform.python_version(), "files": len(files), "sha256": digest.hexdigest()}


def code_pieces() -> list[str]:
    """Cut the files into pieces of at most `PIECE_LINES` lines, at blank lines where there are some.

    Joined by newlines, the pieces are the files one after the other, each below a line with its path. A blank line belongs
    to the piece that follows it.
    """
    pieces: list[str] = []
    for file in code_files():
        piece: list[str] = []
        for line in ("", HEADER.format(path=file.path), *file.lines):
            if piece and (len(piece) >= PIECE_LINES or (not line.strip() and piece[-1].strip())):
                pieces.append("\n".join(piece))
                piece = []
            piece.append(line)
        pieces.append("\n".join(piece))
    return pieces


def code_text() -> str:
    """Join the files, each below a line with its path."""
    return "\n".join(code_pieces()).removeprefix("\n")


class Library:
    """The files with their token counts, which are counted once and only for the files that are used.

    Args:
        count_tokens: text -> number of tokens.

    Attributes:
        files: see `code_files`.

    Raises:
        FileNotFoundError: see `code_files`.
    """

    def __init__(self, count_tokens: Callable[[str], int]) -> None:
        self.files = code_files()
        self.tokens = functools.cache(lambda file: count_tokens(file.text))


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
    raise ValueError(f"length {length} is too long: the files of code have {total} tokens together")


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
