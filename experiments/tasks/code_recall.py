"""Questions about a function that is defined thousands of tokens above, with the code around it as the haystack.

Asked is one of four facts, which the syntax tree gives:

* the parameter list of a function with at least two parameters besides ``self`` or ``cls``;
* the default value of a parameter, unless it is ``None``, ``True`` or ``False``;
* the exception that a function raises, if it names exactly one;
* the annotation of what it returns, unless it is ``None``.

No other function or class of the files has the function's name, the question does not hold the answer, and the function
stands in the first three quarters of the lines. The kind is drawn first, then the answer among the different answers of
this kind, then the function. So a constant answer such as ``ValueError`` is seldom right.
"""

import ast
import builtins
import collections
import dataclasses
import functools
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence

from experiments.tasks.base import PROMPTS, Document, Question, Request, TooShort
from experiments.tasks.code_files import CodeFile, Tail, enough_files
from experiments.tasks.code_names import rename, renamed
from experiments.tasks.fitting import fit

NEAREST = 0.75  # of the lines; a function that is asked for is defined above
DEPTH_WIDTH = 0.05  # of the lines, how far a function may be from the depth
LETTERS = 90  # of an answer, at most
_QUESTION_ROOM = 100  # tokens, for the choice of what is asked; the context is as long as the question allows
_TRIES = 20  # draws of files, because the end of a file may define no function that can be asked for
_DEFINED = re.compile(r"\b(?:def|class)\s+(\w+)")
_TRIVIAL = frozenset(("None", "True", "False"))
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something to ask about a function.

    Attributes:
        kind: parameters, default, exception or returns.
        name: the function.
        parameter: of a default value; "" otherwise.
        answer: the source text.
        line: on which the function begins, counted from 1.
    """

    kind: str
    name: str
    parameter: str
    answer: str
    line: int

    def question(self) -> Question:
        """Write the question."""
        prompt, named = PROMPTS["code_recall"], {"name": self.name, "parameter": self.parameter}
        question, prefix = (prompt.forms[form].format(**named) for form in (self.kind, f"{self.kind}_prefix"))
        closed = self.answer + (")`" if self.kind == "parameters" else "`")
        return Question(prompt.question.format(question=question), prefix, (self.answer,), closed)


def code_recall(request: Request, new_names: bool = False) -> Document:
    """Generate files of code with questions about different functions."""
    rng, library, count_tokens, prompt = request.rng, request.haystack, request.count_tokens, request.prompt
    header = count_tokens(prompt.context.format(context=""))
    seen = request.length - header - prompt.tokens - request.num_questions * _QUESTION_ROOM
    facts: list[Fact] = []
    for _ in range(_TRIES):
        # The first file of the order comes last: a short length then has the end of one file.
        order = rng.sample(library.files, len(library.files))
        originals = enough_files(library, order, request.length)[::-1]
        files, names = rename(originals, rng, new_names)
        tail = Tail(files, request.length, count_tokens)
        start = tail.start(seen)
        placed = list(_placed(originals, names, tail, start))
        facts = _choose(placed, request.num_questions, request.depth, start, len(tail.lines), rng)
        if len(facts) == request.num_questions:
            break
    else:
        raise TooShort(
            f"length {request.length} is too short: expected {request.num_questions} functions to ask for, got {len(facts)}"
        )

    def build(budget: int) -> str:
        return prompt.context.format(context=tail.text(budget))

    return fit(request, [fact.question() for fact in facts], header, build)


def _placed(originals: Sequence[CodeFile], names: Mapping[str, str], tail: Tail, start: int) -> Iterator[tuple[int, Fact]]:
    """List the facts that may be asked for, renamed, each with the index of its line in the tail."""
    count = collections.Counter(name for file in originals for name in _DEFINED.findall(file.text))
    for file, offset in zip(originals, tail.offsets, strict=True):
        for fact in facts_of(file):
            at = offset + fact.line - 1
            if at <= start or count[fact.name] > 1:
                continue
            new = {field: renamed(vars(fact)[field], names) for field in ("name", "parameter", "answer")}
            asked = dataclasses.replace(fact, **new)
            if asked.answer.lower() not in (asked.question().question + asked.question().answer_prefix).lower():
                yield at, asked


def _choose(
    placed: Sequence[tuple[int, Fact]], count: int, depth: float | None, start: int, stop: int, rng: random.Random
) -> list[Fact]:
    """Draw facts about different functions; with a depth, the first is the nearest to it, if it is near enough."""
    left = [(at, fact) for at, fact in placed if at - start <= NEAREST * (stop - start)]
    chosen: list[Fact] = []
    if depth is not None:
        at = start + depth * (stop - start)
        near = [item for item in placed if abs(item[0] - at) <= DEPTH_WIDTH * (stop - start)]
        if not near:
            return []
        chosen.append(min(near, key=lambda item: abs(item[0] - at))[1])
    while len(chosen) < count:
        left = [item for item in left if item[1].name not in {fact.name for fact in chosen}]
        if not left:
            break
        kind = rng.choice(sorted({fact.kind for _, fact in left}))
        answer = rng.choice(sorted({fact.answer for _, fact in left if fact.kind == kind}))
        chosen.append(rng.choice([fact for _, fact in left if (fact.kind, fact.answer) == (kind, answer)]))
    return chosen


def score_code_answer(prediction: str, answers: Sequence[str]) -> float:
    """Compare the output with the reference: 1.0 if they are equal, apart from spaces and the kind of quotes.

    The output ends at the first backtick, which closes the backtick of the answer's opening, or at the end of the line.
    A bracket, colons, commas and full stops behind the answer do not count.
    """
    text = re.split(r"[`\n]", prediction.strip().lstrip("`"), maxsplit=1)[0][: 4 * LETTERS]
    return float(any(_plain(text) == _plain(answer) for answer in answers))


def _plain(text: str) -> str:
    """Write code as the syntax tree does; text that is neither parameters nor an expression loses its spaces."""
    text = text.strip().rstrip(":,.;")
    for code in (text, text.removesuffix(")")):
        for form in ("def f({}): pass", "({})"):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of doubtful code
                    return ast.unparse(ast.parse(form.format(code)))
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue
    return "".join(text.split())


@functools.cache
def facts_of(file: CodeFile) -> tuple[Fact, ...]:
    """List the facts of all functions of a file; see the module."""
    functions = [node for node in ast.walk(file.tree) if isinstance(node, _Function) and not node.name.startswith("__")]
    facts = [fact for function in functions for fact in _facts(file, function)]
    return tuple(fact for fact in facts if len(fact.answer) <= LETTERS and not set("\n`") & set(fact.answer))


def _facts(file: CodeFile, function: _Function) -> Iterator[Fact]:
    name, line, arguments = function.name, function.lineno, function.args

    def source(node: ast.AST) -> str:
        return ast.get_source_segment(file.text, node) or "\n"  # a newline is refused, like an answer of several lines

    positional = [*arguments.posonlyargs, *arguments.args]
    parameters = [argument for argument in (*positional, *arguments.kwonlyargs) if argument.arg not in ("self", "cls")]
    head = re.fullmatch(rf"\s*(?:async )?def {name}\((.*)\):", file.lines[line - 1])
    if head and len(parameters) >= 2 and function.returns is None:
        yield Fact("parameters", name, "", head.group(1), line)
    pairs = [*zip(positional[::-1], arguments.defaults[::-1], strict=False)]  # defaults belong to the last parameters
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    for argument, default in pairs:
        if default is not None and source(default) not in _TRIVIAL:
            yield Fact("default", name, argument.arg, source(default), line)
    raised = {text for node in _own_nodes(function) if isinstance(node, ast.Raise) for text in _exception(node)}
    if len(raised) == 1 and None not in raised:
        yield Fact("exception", name, "", str(*raised), line)
    if function.returns is not None and source(function.returns) not in _TRIVIAL:
        yield Fact("returns", name, "", source(function.returns), line)


def _own_nodes(function: _Function) -> Iterator[ast.AST]:
    """Walk through a function, but not through the functions and classes inside of it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            waiting += ast.iter_child_nodes(node)


def _exception(node: ast.Raise) -> Iterator[str | None]:
    """Name the exception that a statement raises; None if a variable holds it, nothing if it raises the last one again."""
    if node.exc is None:
        return
    named = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    text = ast.unparse(named)
    plain = isinstance(named, (ast.Name, ast.Attribute)) and re.fullmatch(r"[\w.]+", text)
    last = text.rpartition(".")[2]
    yield text if plain and (last[:1].isupper() or text in dir(builtins)) else None
