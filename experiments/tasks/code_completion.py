"""The next line of a file, behind the file's beginning and other files, in the manner of LCC and RepoBench.

LCC: Guo et al. 2023, arXiv:2306.14893; RepoBench: Liu et al. 2023, arXiv:2306.03091; prompt and scorer: LongBench, Bai et
al. 2023, arXiv:2308.14508. Like LongBench's lcc and repobench-p, the task has no chat template around its prompt.

The line to write is a statement on a line of its own. Every name in it, builtins aside, stands above it in the same file, and
it is not the line above it again. Files of the same package come last before the file, like RepoBench's imported files.

Departures: the text is Python's standard library. Indentation is not scored, because chat models leave it out. RepoBench's
exact match is recorded as well.
"""

from __future__ import annotations

import ast
import builtins
import functools
import keyword
import re

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.code_context import Tail, enough_files, rename
from experiments.tasks.code_files import CodeFile
from experiments.tasks.fitting import fit

COMPLETION_TOKENS = 64
COMPLETION_CONTEXT = "Please complete the code given below. \n{context}"
COMPLETION_QUESTION = "\nNext line of code:\n"
FIRST_LINE = 40  # lines of the file above the line, at least
LINE_LETTERS = (12, 100)  # of the line, at least and at most
_MARKS = ("`", "#", "//")  # LongBench's scorer skips lines with these
_NAME = re.compile(r"\b[^\W\d]\w*")
_KNOWN = frozenset((*keyword.kwlist, *dir(builtins)))


def code_completion(name: str, new_names: bool, request: Request) -> Document:
    """Generate a document with a single question, which is the next line.

    Args:
        name: registry name.
        new_names: whether identifiers are renamed.
        request: what to generate; `haystack` holds the files.

    Returns:
        The document.

    Raises:
        ValueError: the length is too short, or longer than all files together.
    """
    rng, library, count_tokens = request.rng, request.haystack, request.count_tokens
    file, line = None, 0
    while file is None:
        drawn = rng.choice(library.files)
        if lines := next_lines(drawn):
            file, line = drawn, rng.choice(lines)
    others = [other for other in rng.sample(library.files, len(library.files)) if other is not file]
    others.sort(key=lambda other: other.package != file.package)  # the nearest first; the order drawn stays otherwise
    chosen = [file, *enough_files(library, others, request.length)]
    changed = rename(chosen[::-1], rng, new_names)
    answer = changed.files[-1].lines[line - 1].strip()
    asked = Question(COMPLETION_QUESTION, "", (answer,), answer)
    tail = Tail(changed.files, request.length, count_tokens, last=line - 1)
    room = request.answer_room([asked], COMPLETION_TOKENS)
    fixed = count_tokens(COMPLETION_CONTEXT.format(context="")) + room + request.question_tokens([asked])

    def build(budget: int) -> Document:
        context = COMPLETION_CONTEXT.format(context=tail.text(budget)[0])
        return Document(name, context, (asked,), COMPLETION_TOKENS)

    return fit(request, build, fixed, room)


@functools.cache
def next_lines(file: CodeFile) -> tuple[int, ...]:
    """List the lines of a file that may be asked for, counted from 1."""
    made, seen = [], set()
    starts = {node.lineno for node in ast.walk(file.tree) if _alone(node)}
    for number, line in enumerate(file.lines, start=1):
        text = line.strip()
        names = set(_NAME.findall(text)) - _KNOWN
        fits = LINE_LETTERS[0] <= len(text) <= LINE_LETTERS[1] and not any(mark in text for mark in _MARKS)
        if number > FIRST_LINE and number in starts and fits and names and names <= seen:
            if text != file.lines[number - 2].strip():
                made.append(number)
        seen.update(_NAME.findall(line))
    return tuple(made)


def _alone(node: ast.AST) -> bool:
    """Tell whether a node is a statement, or the head of one, that begins on its line and ends there."""
    if isinstance(node, (ast.If, ast.For, ast.While, ast.With)):
        return node.body[0].lineno == node.lineno + 1
    plain = isinstance(node, ast.stmt) and node.lineno == node.end_lineno
    # A text alone is documentation, and an import is decided by what follows.
    return plain and not isinstance(node, (ast.Import, ast.ImportFrom)) and not _is_text(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
