"""Plain English that a machine can check; ``python -m tests.rules.english PATH ...`` lists what breaks a rule.

* The docstring of a function begins with a verb, as an order: "Return", "Refuse". Properties are nouns, and tests state laws.
* No text points at a thing that it could name; `POINTING` lists the words.
* No sentence has more than 35 words.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
MOST_WORDS = 35
POINTING = re.compile(r"\b(those of|that of|likewise)\b", re.IGNORECASE)
VERBS = frozenset(pathlib.Path(__file__).with_name("verbs.txt").read_text().split())


def functions(tree: ast.AST) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield each function that has a docstring, and the docstring; properties are left out."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (text := ast.get_docstring(node)):
            kinds = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
            if not kinds & {"property", "cached_property", "setter", "fixture"}:
                yield node, text


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and the texts of exceptions, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if text := ast.get_docstring(node):
                yield node.body[0].lineno, text
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of prose: blocks of code, tables, formulas and headings are left out."""
    text = re.sub(r"(?ms)^[ \t]*```.*?^[ \t]*```", "\n\n", text)
    text = re.sub(r"(?m)::\n\n((?:[ \t]+\S.*\n?|\n)+)", ".\n\n", text)
    text = re.sub(r"(?ms)^\$\$.*?\$\$|<!--.*?-->", "\n\n", text)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[*+-]|\d+\.|>>>|#+|\|)\s)|\n(?=\s*\w[\w, ]*: )", text):
        if re.match(r"\s*(\||#|>>>|!\[)", block):
            continue
        block = re.sub(r"``[^`]*``|`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", block))
        yield from re.split(r"(?<=[.!?:;])\s+", block)


def broken(path: pathlib.Path) -> Iterator[str]:
    """Yield a line for each place in a file that breaks a rule."""
    where = path.relative_to(ROOT).as_posix()
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        parts = [(source[: found.start()].count("\n") + 1, found[0]) for found in re.finditer(r"(?s).+", source)]
    else:
        tree = ast.parse(source)
        parts = list(texts(tree))
        if path.parts[len(ROOT.parts)] != "tests":
            for node, text in functions(tree):
                first = re.match(r"[\w'-]*", text)[0]
                if first not in VERBS:
                    yield f"{where}:{node.lineno}: {node.name}: begins with {first!r}, no verb of verbs.txt: {text[:70]!r}"
    for line, text in parts:
        for sentence in sentences(text):
            words = len(re.findall(r"[\w'’-]*[A-Za-z][\w'’-]*", sentence))
            if words > MOST_WORDS:
                yield f"{where}:{line}: {words} words: {' '.join(sentence.split())[:110]}"
        text = re.sub(r"(?s)```.*?```", "", text)
        for found in POINTING.finditer(text):
            yield f"{where}:{line}: points: ...{' '.join(text[max(0, found.start() - 40) : found.end() + 20].split())}..."


def files(*places: str) -> Iterator[pathlib.Path]:
    """Yield the files below some places that have text for readers; the notebook's pages are as they were written."""
    for place in places:
        at = ROOT / place
        for path in [at] if at.is_file() else sorted([*at.rglob("*.py"), *at.rglob("*.md")]):
            inside = path.relative_to(ROOT).as_posix()
            if not re.match(r"docs/(notebook|records|tables|_build|methods|notebooks|decisions\.md)|tests/goldens", inside):
                yield path


if __name__ == "__main__":
    lines = [line for path in files(*sys.argv[1:]) for line in broken(path)]
    sys.stdout.write("\n".join([*lines, f"{len(lines)} places"]) + "\n")
    sys.exit(bool(lines))
