"""Methods by name, and their knobs: the classes that `kvjax.methods` imports, and the plug-ins of `kvjax.plugins`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from collections.abc import Collection, Sequence
from typing import Any

from kvjax import plugins
from kvjax.fields import check_names, nearest, shown
from kvjax.method import Method, check_method
from kvjax.plugins import builtin as builtin

_WORDS = {type(None): {"none": None}, bool: {"true": True, "false": False}}  # values that are words


@dataclasses.dataclass(frozen=True)
class Knob:
    """One hyper-parameter of a method."""

    name: str
    default: Any
    traced: bool  # whether a sweep can vary it within one compiled program
    doc: str  # its meaning


def classes() -> dict[str, type[Method]]:
    """Return method classes by lower-case name: built-in, then announced by installed packages, then registered."""
    return {**builtin(), **plugins.outside()}


def canonical_name(name: str) -> str:
    """Return the name in `classes` of a method, which is given by its name in any case or its path ``package.module:Class``.

    The class of a path is imported and registered. An unknown name passes; `make` refuses it.

    Raises:
        ValueError: a path that names no method; see `kvjax.plugins.load`.
    """
    return plugins.load(name).__name__.lower() if ":" in name else name.strip().lower()


def find(name: str) -> type[Method]:
    """Find the class of a method.

    Args:
        name: see `canonical_name`.

    Raises:
        ValueError: ``name`` is no text, or names no method; the message has the nearest known name.
    """
    if not isinstance(name, str):
        names = ", ".join(sorted(classes()))
        raise ValueError(f"name must be the name of a method, got {shown(name)}; known methods: {names}")
    given = canonical_name(name)  # which may import and register a class
    known = classes()
    cls = known.get(given)
    if cls is None:
        raise ValueError(f"unknown method {name!r}{nearest(given, known)}; known methods: {', '.join(sorted(known))}")
    return cls


def extrapolating() -> list[str]:
    """List the names of the methods that renumber positions, so that a prompt may be longer than the model's limit."""
    return sorted(name for name, cls in classes().items() if cls.extrapolates)


def lasting_name(name: str) -> str:
    """Return the name by which other processes find a method, too: the path of a plug-in, else the name itself."""
    cls = classes().get(name)
    return name if cls is None else plugins.path_of(cls) or name


def make(name: str, tokenizer: Any = None, vocab_size: int | None = None, **knobs: Any) -> Method:
    """Build a method from its name (any case) and knobs.

    Args:
        name: see `canonical_name`.
        tokenizer: a method with `Method.needs_tokenizer` takes some knobs from it, unless they are among ``knobs``. Other
            methods ignore it.
        vocab_size: entries of the model's vocabulary; None means the size of the tokenizer's vocabulary.
        **knobs: hyper-parameters.

    Raises:
        ValueError: an unknown method or knob (the message has the nearest known name), or a value that the method refuses.
    """
    cls = find(name)
    check_names(cls, knobs)
    if cls.needs_tokenizer and tokenizer is not None:
        size = 1 + max(tokenizer.get_vocab().values()) if vocab_size is None else vocab_size
        made = cls.tokenizer_knobs(tokenizer, size)
        knobs = made | {knob: x for knob, x in knobs.items() if x is not None or knob not in made}
    return cls(**knobs)


def parse_knobs(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Parse texts of the form ``knob=value`` to knobs for `make`.

    A value is a whole number, a number, ``true``, ``false``, ``none``, a text, or numbers with commas between them, as the
    knob's type allows. Unknown methods and knobs pass; `make` refuses them.

    Args:
        method: a method's name; see `canonical_name`.
        pairs: the texts.

    Raises:
        ValueError: a text without "=", or a value of the wrong type.
    """
    given: dict[str, Any] = {}
    name = canonical_name(method)  # first, because it may import and register a class
    cls = classes().get(name)
    kinds = typing.get_type_hints(cls) if cls else {}
    for pair in pairs:
        knob, equals, text = pair.partition("=")
        if not equals or not knob.strip() or not text.strip():
            raise ValueError(f"--set takes KNOB=VALUE, got {pair!r}")
        knob = knob.strip()
        given[knob] = _value(knob, text.strip(), kinds[knob]) if knob in kinds else text
    return given


def _value(knob: str, text: str, kind: Any) -> Any:
    """Convert ``text`` to the knob's annotated type; no text can stand for an array."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in options:
        if option in _WORDS and text.lower() in _WORDS[option]:
            return _WORDS[option][text.lower()]
    tuples = [option for option in options if typing.get_origin(option) is tuple]
    if any(typing.get_origin(typing.get_args(option)[0]) is tuple for option in tuples):
        return text  # the name of a file with such tuples, which commands read; `make` refuses it
    listed = bool(tuples)
    if listed and "," in text:
        return tuple(_value(knob, part.strip(), typing.get_args(tuples[0])[0]) for part in text.split(","))
    for option in (int, float, str):
        if option in options:
            try:
                return option(text)
            except ValueError:
                continue
    plain = sorted(option.__name__ for option in (int, float, str, bool) if option in options)
    plain += ["numbers with commas between them"] * listed + ["none"] * (type(None) in options)
    raise ValueError(f"knob {knob!r} takes {' or '.join(plain) or 'what no text can say'}, got {text!r}")


def resolve(method: Method | str) -> Method:
    """Return the method itself, or make the method of that name with default knobs."""
    return make(method) if isinstance(method, str) else check_method("method", method)


def resolve_each(methods: Sequence[Method | str]) -> list[Method]:
    """Apply `resolve` to every entry of a list, which must not be empty."""
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise ValueError(f"methods must be a list of methods or names, got {shown(methods)}")
    if not methods:
        raise ValueError("methods must have at least one method, got none")
    return [resolve(method) for method in methods]


def knobs(cls: type[Method]) -> list[Knob]:
    """List the knobs of a method class. The comment behind a field is the meaning of the knob."""
    comments: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if owner.__module__ in sys.modules and dataclasses.is_dataclass(owner):
            found = re.findall(r"^    (\w+):[^=\n#]*(?:=[^#\n]*)?  # (.+)$", _source(owner), re.MULTILINE)
            comments.update(found)
    return [
        Knob(
            name=field.name,
            default=field.default,
            traced=not field.metadata.get("static", False),
            doc=comments.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
    ]


def summary(cls: type[Method]) -> str:
    """Return the idea of a method in one line: the first paragraph of its module's docstring, without the name.

    If the module's docstring does not begin with the name of the class, it is the first paragraph of the class's docstring.
    """
    told = [inspect.getdoc(owner) or "" for owner in (sys.modules[cls.__module__], cls)]
    text = told[0] if told[0].startswith(f"{cls.__name__}: ") else told[1]
    if text.startswith(f"{cls.__name__}("):  # a dataclass without a docstring
        return "no docstring"
    return text.split("\n\n")[0].replace("\n", " ").removeprefix(f"{cls.__name__}: ") or "no docstring"


@functools.cache  # Python parses the whole file for each class
def _source(cls: type) -> str:
    """Return the source text of a class; empty if the class was not read from a file."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""


def markdown(names: Collection[str] | None = None) -> str:
    """Write a Markdown table of the built-in methods with the given ``names``; None means all."""
    lines = ["| method | idea | keeps | paper |", "|---|---|---|---|"]
    for name, cls in sorted(builtin().items()):
        if names is not None and name not in names:
            continue
        path = f"{cls.__module__.replace('.', '/')}.py"
        idea = summary(cls)
        lines.append(
            f"| [`{cls.__name__}`]({path}) | {idea[0].upper()}{idea[1:]} | {cls.keeps} "
            f"| [{cls.PAPER}](https://arxiv.org/abs/{cls.PAPER.removeprefix('arXiv:')}) |"
        )
    return "\n".join(lines)
