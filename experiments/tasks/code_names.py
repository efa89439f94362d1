"""New names for the identifiers of some files, so that a model cannot answer from the text that it was trained on.

Renamed is what the files define: functions, classes, parameters, variables, and attributes of ``self``. Kept are keywords,
builtins, special methods, imported modules with their attributes, and names with fewer than `SHORTEST` letters. Kept are also
methods of builtin types, and keyword arguments of functions that are imported or built in.

A name is replaced wherever it stands as a whole word, in strings and comments, too. So the renamed text has no trace of it.
The renamed files still parse. They need not run, because a name that is both a parameter here and an attribute of a foreign
object has the new name in both places.
"""

import ast
import builtins
import functools
import io
import keyword
import random
import re
from collections.abc import Iterator, Mapping, Sequence

from experiments.tasks.code_files import CodeFile
from experiments.tasks.words import every_word

SHORTEST = 3  # letters of a name that is replaced
_WORD = re.compile(r"[^\W\d]\w*")
_ESCAPED = re.compile(r"\\([^\W\d]\w*)|\\N\{([^}]*)\}")
_HUMP = re.compile(r"_+|(?<=[a-z0-9])(?=[A-Z])")
_TYPES = (
    str, bytes, bytearray, int, float, list, tuple, dict, set, frozenset, property, type, BaseException, OSError,
    io.TextIOWrapper, io.BytesIO, io.StringIO, re.Pattern, re.Match,
)  # fmt: skip


@functools.cache
def _kept() -> frozenset[str]:
    """List the names that mean the same in all files."""
    names = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self", "cls"}
    return frozenset(names.union(*map(dir, _TYPES)))


@functools.cache
def _words() -> tuple[str, ...]:
    return tuple(word for word in every_word() if word.isalpha() and word.islower() and 3 <= len(word) <= 9)


def new_names(files: Sequence[CodeFile], rng: random.Random) -> dict[str, str]:
    """Draw a new name for every identifier that the files define.

    A new name has the case and the leading underscores of the old name, and as many words, at most three. No word of
    the files is a new name, and no new name is drawn twice.

    Returns:
        New names by old names, sorted by the old names.
    """
    top_level = {}
    for file in files:
        top_level.setdefault(file.package, set()).update(_top_level(file.tree))
    defined, kept = set(), set(_kept())
    for file in files:
        defined.update(_defined(file.tree))
        kept.update(_imported(file, top_level[file.package]))
        for escaped, character in _ESCAPED.findall(file.text):
            kept.update((escaped, *_WORD.findall(character)))
    taken = {word for file in files for word in _WORD.findall(file.text)} | kept
    names: dict[str, str] = {}
    for name in sorted(defined - kept):
        if len(name) >= SHORTEST and name.isascii() and not name.startswith("__"):
            names[name] = _draw(name, taken, rng)
            taken.add(names[name])
    return names


def renamed(text: str, names: Mapping[str, str]) -> str:
    """Replace every whole word of `text` that has a new name; a word after a backslash is part of an escape."""
    return re.sub(r"(?<!\\)\b[^\W\d]\w*", lambda match: names.get(match.group(), match.group()), text)


def rename(files: Sequence[CodeFile], rng: random.Random, wanted: bool = True) -> tuple[list[CodeFile], dict[str, str]]:
    """Rename the identifiers of files, and the modules in their paths, which would give them away.

    Returns:
        The files, and the new names by the old names; if renaming is not wanted, the files as they are, and no names.
    """
    if not wanted:
        return list(files), {}
    names = new_names(files, rng)
    made = []
    for file in files:
        path = "/".join(rng.choice(_words()) for _ in file.path.split("/"))
        made.append(CodeFile(path + ".py", renamed(file.text, names)))
    return made, names


def _draw(name: str, taken: set[str], rng: random.Random) -> str:
    """Draw a free name of the same style."""
    bare = name.lstrip("_")
    count = min(3, len([part for part in _HUMP.split(bare) if part]))
    tries = 0
    while True:
        parts = [rng.choice(_words()) for _ in range(max(count, 1) + tries // 20)]
        if bare.isupper():
            text = "_".join(parts).upper()
        elif bare[:1].isupper():
            text = "".join(part.capitalize() for part in parts)
        elif "_" not in bare and not bare.islower():
            text = parts[0] + "".join(part.capitalize() for part in parts[1:])
        else:
            text = "_".join(parts)
        text = name[: len(name) - len(bare)] + text
        if text not in taken and not keyword.iskeyword(text):
            return text
        tries += 1


def _top_level(tree: ast.Module) -> Iterator[str]:
    """List the functions, classes and variables of a module, which its package may import from it."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _defined(tree: ast.Module) -> Iterator[str]:
    """List everything that a file gives a name to."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr


def _imported(file: CodeFile, inner: set[str]) -> Iterator[str]:
    """List the imported names of a file, and the attributes and keyword arguments that belong to them.

    Args:
        file: the file.
        inner: what the files of its package define; a name that the file imports from there is none of the list.
    """
    foreign, inside = set(dir(builtins)), set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from alias.name.split(".")
                foreign.add(alias.asname or alias.name.partition(".")[0])
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            near = node.level > 0 or module.partition(".")[0] == file.package
            yield from module.split(".") if module else ()
            for alias in node.names:
                if not (near and alias.name in inner):
                    yield alias.name
                    (inside if near else foreign).add(alias.asname or alias.name)
    yield from foreign | inside
    for node in ast.walk(file.tree):
        root, attributes = _chain(node)
        if root in foreign:
            yield from attributes
        elif root in inside:
            yield from (name for name in attributes if name not in inner)
        if isinstance(node, ast.Call) and _chain(node.func)[0] in foreign:
            yield from (argument.arg for argument in node.keywords if argument.arg)


def _chain(node: ast.AST) -> tuple[str, list[str]]:
    """Return the name at the beginning of ``name.attribute.attribute``, "" if there is none, and the attributes."""
    attributes = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else ""), attributes
