"""The next line of a file, behind the file's beginning and other files, in the manner of LCC and RepoBench.

LCC: Guo et al. 2023, arXiv:2306.14893; RepoBench: Liu et al. 2023, arXiv:2306.03091; scorer: LongBench, Bai et al. 2023,
arXiv:2308.14508. The prompt is the code and nothing else, without a chat template. Its last lines are the question, so a
question that follows a compressed context says where the file goes on.

The line to write is a statement on a line of its own. Every name in it, builtins aside, stands above it in the same file.
The line is determined by the context, and not by what is near: it stands once more, far above, behind the same line or lines.
See `source_lines`. Files of the same package come last before the file, like RepoBench's imported files.

Departures: the text is Python's standard library. LongBench's instruction and its "Next line of code:" are left out, because
small chat models answer them with another text. Indentation is not scored. RepoBench's exact match is recorded as well.
"""

import ast
import builtins
import functools
import keyword
import re
from collections.abc import Sequence

from experiments.tasks.base import Document, Question, Request
from experiments.tasks.code_files import CodeFile, Tail, enough_files
from experiments.tasks.code_names import rename
from experiments.tasks.fitting import fit

QUESTION_LINES = 8  # the last lines, which are the question
SAME_LINES = 1  # above the line and above its source, at least
NEAREST, FARTHEST = 1 / 8, 3 / 4  # of the length, between the source and the line
FIRST_LINE = 40  # lines of the file above the line, at least
LINE_LETTERS = (12, 100)  # of the line, at least and at most
_MARKS = ("`", "#", "//")  # LongBench's scorer skips lines with these
_NAME = re.compile(r"\b[^\W\d]\w*")
_LONGEST = 16  # lines of a run that are compared
_TRIES = 400  # draws of files
_KNOWN = frozenset((*keyword.kwlist, *dir(builtins)))


def code_completion(request: Request, new_names: bool = False) -> Document:
    """Generate a document with a single question, which is the next line."""
    rng, library = request.rng, request.haystack
    for _ in range(_TRIES):
        file = rng.choice(library.files)
        others = [other for other in rng.sample(library.files, len(library.files)) if other is not file]
        others.sort(key=lambda other: other.package != file.package)  # the nearest first; the order drawn stays otherwise
        chosen = [file, *enough_files(library, others, request.length)][::-1]
        # Drawn before the renaming, so that the task with new names asks for the same line.
        if line := _drawn_line(chosen, request):
            break
    else:
        raise ValueError(f"length {request.length} is unsuitable: expected a line that stands once more far above, got none")
    files, _ = rename(chosen, rng, new_names)
    lines = files[-1].lines[: line - 1]
    answer = files[-1].lines[line - 1].strip()
    asked = Question("\n" + "\n".join(lines[-QUESTION_LINES:]) + "\n", "", (answer,), answer)
    tail = Tail(files, request.length, request.count_tokens, last=line - 1 - QUESTION_LINES)
    return fit(request, [asked], 0, tail.text)


def _drawn_line(files: Sequence[CodeFile], request: Request) -> int | None:
    """Draw a line of the last file whose source is far above in the files; None if the file has none."""
    above = [line for file in files[:-1] for line in file.lines]
    lines = [*above, *files[-1].lines]
    sources = source_lines(lines)
    numbers = [number for number in next_lines(files[-1]) if len(above) + number - 1 in sources]
    for number in request.rng.sample(numbers, len(numbers)):
        at = len(above) + number - 1
        distance = request.count_tokens("\n".join(lines[sources[at] : at]))
        if NEAREST * request.length <= distance <= FARTHEST * request.length:
            return number
    return None


def source_lines(lines: Sequence[str]) -> dict[int, int]:
    """Find the lines that the text above determines.

    The source of a line is the place above it that follows the longest run of the same lines, the nearest if there are
    several. The line is determined if its source is the same line, if the run has `SAME_LINES` lines or more, and if the
    line does not stand between the two. Blank lines and indentation do not count.

    Args:
        lines: of the text.

    Returns:
        For the index of each determined line the index of its source.
    """
    full = [(index, text) for index, line in enumerate(lines) if (text := line.strip())]
    texts = [text for _, text in full]
    sources: dict[int, int] = {}
    last: dict[str, int] = {}
    places: dict[tuple[str, ...], list[int]] = {}
    for at, text in enumerate(texts):
        key = tuple(texts[max(0, at - SAME_LINES) : at])
        before = places.setdefault(key, [])
        if before and len(key) == SAME_LINES:
            source = max(before, key=lambda place: (_run(texts, place, at), place))
            if last.get(text) == source:
                sources[full[at][0]] = full[source][0]
        before.append(at)
        last[text] = at
    return sources


def _run(texts: Sequence[str], one: int, two: int) -> int:
    """Count the lines above two places that are the same."""
    count = 0
    while count < min(_LONGEST, one) and texts[one - count - 1] == texts[two - count - 1]:
        count += 1
    return count


@functools.cache
def next_lines(file: CodeFile) -> tuple[int, ...]:
    """List the lines of a file that may be asked for, counted from 1."""
    numbers, seen = [], set()
    starts = {node.lineno for node in ast.walk(file.tree) if _alone(node)}
    for number, line in enumerate(file.lines, start=1):
        text = line.strip()
        names = set(_NAME.findall(text)) - _KNOWN
        fits = LINE_LETTERS[0] <= len(text) <= LINE_LETTERS[1] and not any(mark in text for mark in _MARKS)
        if number > FIRST_LINE and number in starts and fits and names and names <= seen:
            numbers.append(number)
        seen.update(_NAME.findall(line))
    return tuple(numbers)


def _alone(node: ast.AST) -> bool:
    """Tell whether a node is a statement, or the head of one, that begins on its line and ends there."""
    if isinstance(node, (ast.If, ast.For, ast.While, ast.With)):
        return node.body[0].lineno == node.lineno + 1
    plain = isinstance(node, ast.stmt) and node.lineno == node.end_lineno
    # A text alone is documentation, and an import is decided by what follows.
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return plain and not isinstance(node, (ast.Import, ast.ImportFrom)) and not is_text
