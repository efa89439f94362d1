"""A transcript of tools over Python's standard library: what an agent reads and writes while it edits files.

The user asks for a comment on the definition of some functions. For each function the agent searches its line (grep), reads
it (sed), marks it (sed -i), and reads it again. The commands follow from the request and from the outputs before them, so a
model that still has both predicts them well. Outputs are true: they are computed from the files as edited so far.
"""

import dataclasses
import random
import re
from collections.abc import Iterator

from experiments.tasks.code_files import CodeFile, code_files

REQUEST = (
    "You work in the folder of Python's standard library. Answer with one command of a shell at a time: grep, sed or sed -i. "
    "I give you its output. Put the comment '# {mark}' behind the line that defines each of these functions, in this order. "
    "First search the line, then read the code, then mark the line, then read the line again.\n\n{listed}"
)
NO_OUTPUT = "(no output)"
_SHOWN = 10  # lines that are read behind the definition
_LETTERS = 200  # of a line of output, at most
_DEFINED = re.compile(r"^\s*def (\w+)\(.*:$")  # on one line, so that a comment may follow it


@dataclasses.dataclass(frozen=True)
class Turn:
    """A command and its output."""

    command: str
    output: str


@dataclasses.dataclass(frozen=True)
class Transcript:
    """A request and the turns that fulfil it."""

    request: str
    turns: tuple[Turn, ...]


def transcript(rng: random.Random, functions: int, mark: str = "reviewed") -> Transcript:
    """Draw functions of the standard library's evaluation files, and write the session that marks each of them.

    A function's name is defined once in its file, so the search finds one line.

    Args:
        functions: number of functions, each of which takes four turns.
        mark: the comment.

    Raises:
        ValueError: the files define fewer functions on a line of their own.
        FileNotFoundError: this Python has no sources of its standard library.
    """
    files = [file for file in code_files("eval") if mark not in file.text]
    drawn: list[tuple[CodeFile, int]] = []
    order = rng.sample(files, len(files))
    while len(drawn) < functions:
        if not order:
            raise ValueError(f"functions must be at most {len(drawn)}, which the files define, got {functions}")
        file = order.pop()
        places = [
            at
            for at, line in enumerate(file.lines)
            if (name := _DEFINED.match(line)) and file.text.count(f"def {name.group(1)}(") == 1
        ]
        drawn += [(file, at) for at in rng.sample(places, min(len(places), 3))]
    del drawn[functions:]
    rng.shuffle(drawn)
    lines = {file.path: list(file.lines) for file, _ in drawn}
    listed = "\n".join(f"- {_name(file.lines[at])} in {file.path}" for file, at in drawn)
    turns = [turn for file, at in drawn for turn in _turns(file.path, lines[file.path], at, mark)]
    return Transcript(REQUEST.format(mark=mark, listed=listed), tuple(turns))


def _name(line: str) -> str:
    definition = _DEFINED.match(line)
    assert definition is not None
    return definition.group(1)


def _turns(path: str, lines: list[str], at: int, mark: str) -> Iterator[Turn]:
    """Yield the four turns of a function, and edit its line."""
    name, last = _name(lines[at]), min(at + _SHOWN, len(lines) - 1)
    hits = [f"{number}:{line}" for number, line in enumerate(lines, 1) if f"def {name}(" in line]
    yield Turn(f'grep -n "def {name}(" {path}', _shown(hits))
    yield Turn(f"sed -n '{at + 1},{last + 1}p' {path}", _shown(lines[at : last + 1]))
    lines[at] += f"  # {mark}"
    yield Turn(f"sed -i '{at + 1}s/$/  # {mark}/' {path}", NO_OUTPUT)
    yield Turn(f"sed -n '{at + 1}p' {path}", _shown(lines[at : at + 1]))


def _shown(lines: list[str]) -> str:
    return "\n".join(line[:_LETTERS] for line in lines)
