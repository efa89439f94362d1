"""Methods by name, and their knobs: the classes that `kvjax.methods` imports, plug-ins (`kvjax.plugins`), and wrappers."""

import ast
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvjax import plugins
from kvjax.attention.patterns import Pattern
from kvjax.plugins import builtin as builtin
from kvjax.protocol.describe import describe
from kvjax.protocol.fields import at_length, check_field, check_names, declared, has_shares, nearest, share, shown
from kvjax.protocol.method import Method, check_method
from kvjax.wrappers import named
from kvjax.wrappers.named import WRAPPERS as WRAPPERS
from kvjax.wrappers.named import inner_fields as inner_fields

_SHARE = re.compile(r"0?\.\d+|\d+/[1-9]\d*")  # a budget as a share of the prompt
_INDEX = re.compile(r"-?[0-9]{1,9}")  # of a layer
_MOVED = "; a traced value that is too small or too large becomes the nearest allowed one"
_WORDS = {"none": None, "true": True, "false": False}  # values that are words
# Stands for a tokenizer where only sizes count.
_NO_TEXT = types.SimpleNamespace(get_vocab=dict, encode=lambda text, **options: [], decode=lambda ids: "")


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
    """Return the name in `classes` or `WRAPPERS` of a method, given by its name in any case or as ``package.module:Class``.

    The class of a path is imported and registered. An unknown name passes; `make` refuses it. So does a name with brackets
    (see `parse_method`), which only loses its spaces.

    Raises:
        ValueError: a path that names no method; see `kvjax.plugins.load`.
    """
    if "(" in name:
        return "".join(name.split())
    return plugins.load(name).__name__.lower() if ":" in name else name.strip().lower()


def known() -> dict[str, type[Method]]:
    """Return all classes by the names that `find` knows: wrappers, papers whose method is `Prefill`, and `classes`."""
    return {**dict.fromkeys(named.PATTERNS, WRAPPERS["prefill"]), **WRAPPERS, **classes()}


def find(name: str) -> type[Method]:
    """Find the class of a method.

    Args:
        name: a name, a path or a text with brackets; see `canonical_name` and `parse_method`.

    Raises:
        ValueError: ``name`` is no text, or names no method; the message has the nearest known name.
    """
    listed = ", ".join(sorted(classes()))
    if not isinstance(name, str):
        raise ValueError(f"name must be the name of a method, got {shown(name)}; known methods: {listed}")
    key = canonical_name(named.split_call(name)[0])  # which may import and register a class
    if key not in known():
        module, dot, last = name.rpartition(".")
        near = f" (did you mean {module}:{last}?)" if dot else nearest(key, known())
        raise ValueError(f"unknown method {name!r}{near}; known methods: {listed}; wrappers: {', '.join(WRAPPERS)}")
    return known()[key]


def parse_method(
    text: str, parse: Callable[[str, Sequence[str]], dict[str, Any]] | None = None
) -> tuple[str, dict[str, Any]]:
    """Parse a method and its knobs from a text: ``quest``, ``quest(budget=256)``, ``stages(snapkv, quest(budget=256))``.

    In the brackets stand the methods inside of a wrapper, in the order of its fields or by name (``evict=snapkv``), and
    knobs as ``KNOB=VALUE``. A layer of `kvjax.wrappers.PerLayer` is ``INDEX=METHOD``.

    Args:
        text: a name or a path, with or without brackets.
        parse: parses the texts ``KNOB=VALUE`` of a method; None means `parse_knobs`.

    Returns:
        The canonical name, and its knobs for `make`. A method inside is its name, or ``{name: knobs}``.

    Raises:
        ValueError: a malformed text, an unknown method, a method that the class has no field for, or a bad value.
    """
    name, parts = named.split_call(text)
    name, cls = canonical_name(name), find(name)
    knobs: dict[str, Any] = {}
    if name not in classes() and name in named.PATTERNS:
        knobs, name = {**named.PATTERNS[name][0]}, "prefill"
    fields = inner_fields(cls)
    check_once([knob for knob, _ in parts if knob], text)
    for knob, value in parts:
        if not knob:
            free = [field for field, by_layer in fields.items() if not by_layer and field not in knobs]
            if not free:
                raise ValueError(f"{text!r}: {cls.__name__} takes no {'other ' * bool(fields)}method inside, got {value!r}")
            knobs[free[0]] = _nested(value, parse)
        elif knob in fields:
            check_once([*knobs, knob], text)
            knobs[knob] = _nested(value, parse)
        elif _INDEX.fullmatch(knob) and True in fields.values():
            by_layer = next(field for field, many in fields.items() if many)
            knobs[by_layer] = {**knobs.get(by_layer, {}), int(knob): _nested(value, parse)}
        else:
            knobs |= (parse or parse_knobs)(name, [f"{knob}={value}"])
    return name, knobs


def check_once(knobs: Sequence[str], text: str) -> None:
    """Refuse a knob that a text gives twice: nobody knows which of its values is meant."""
    if twice := [knob for at, knob in enumerate(knobs) if knob in knobs[:at]]:
        raise ValueError(f"expected each knob once, got {twice[0]!r} twice in {shown(text)}")


def _nested(text: str, parse: Callable[[str, Sequence[str]], dict[str, Any]] | None) -> Any:
    name, knobs = parse_method(text, parse)
    name = name if name in WRAPPERS else lasting_name(name)
    return {name: knobs} if knobs else name


def extrapolating() -> list[str]:
    """List the names of the methods that renumber positions, so that a prompt may be longer than the model's limit."""
    return sorted(name for name, cls in classes().items() if cls.extrapolates)


def lasting_name(name: str) -> str:
    """Return the name by which other processes find a method: the path of a plug-in or a wrapper, else the name itself."""
    cls = {**WRAPPERS, **classes()}.get(name)
    return name if cls is None else plugins.path_of(cls) or name


def make(name: str, tokenizer: Any = None, vocab_size: int | None = None, **knobs: Any) -> Method:
    """Build a method from its name (any case) and knobs: ``make("quest", budget=256)``, ``make("twilight(quest)")``.

    Args:
        name: a name, a path or a text with brackets; see `canonical_name` and `parse_method`.
        tokenizer: a method that needs the text of tokens takes some knobs from it, unless they are among ``knobs``
            (`Method.tokenizer_knobs`). Other methods ignore it.
        vocab_size: entries of the model's vocabulary; None means the size of the tokenizer's vocabulary.
        **knobs: hyper-parameters. A method inside of a wrapper may be a method, a name or ``{name: knobs}``.

    Raises:
        ValueError: an unknown method or knob (the message has the nearest known name), a value that the method refuses, or a
            wrapper without the method inside.
    """
    cls = find(name)
    knobs = {**parse_method(name)[1], **knobs}
    _check_names(cls, knobs)
    for field, by_layer in inner_fields(cls).items():
        if by_layer and isinstance(inner := knobs.get(field), Mapping):
            knobs[field] = {layer: _made_inner(one, tokenizer, vocab_size) for layer, one in inner.items()}
        elif field in knobs and not by_layer:
            knobs[field] = _made_inner(knobs[field], tokenizer, vocab_size)
    if isinstance(pattern := knobs.get("pattern"), Mapping):
        check_names(Pattern, pattern)
        knobs["pattern"] = Pattern(**pattern)
    if tokenizer is not None:
        of_text = cls.tokenizer_knobs(tokenizer, vocab_size)
        knobs = of_text | {knob: x for knob, x in knobs.items() if x is not None or knob not in of_text}
    return cls(**knobs)


def _check_names(cls: type[Method], knobs: Mapping[str, Any]) -> None:
    """Refuse knobs that a class does not have, and a wrapper that lacks what it is made of."""
    check_names(cls, knobs)
    missing = [field.name for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]
    if missing := [name for name in missing if name not in knobs]:
        example = named.EXAMPLES.get(cls.__name__.lower())
        hint = f", for example {example}" if example else ""
        raise ValueError(f"{cls.__name__} must be given {' and '.join(missing)}{hint}; got {', '.join(knobs) or 'nothing'}")


def without_text(method: Method, vocab_size: int) -> Method:
    """Fill the knobs that are None and come from a tokenizer (`Method.tokenizer_knobs`); sizes ask for no values."""
    of_text, changed = method.tokenizer_knobs(_NO_TEXT, vocab_size), {}
    for name, value in vars(method).items():
        if isinstance(value, dict):
            changed[name] = {at: without_text(inner, vocab_size) for at, inner in value.items()}
        elif isinstance(value, Method):
            changed[name] = without_text(value, vocab_size)
        elif value is None and name in of_text:
            changed[name] = of_text[name]
    return dataclasses.replace(cast("Any", method), **changed) if changed else method


def one_inner(value: str | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return name and knobs of the method inside of a wrapper, which is a text or ``{name: knobs}``.

    Raises:
        ValueError: a mapping of another size, or knobs that are no mapping.
    """
    if isinstance(value, str):
        return value, {}
    if len(value) != 1 or not isinstance(next(iter(value.values())) or {}, Mapping):
        raise ValueError(f"a wrapper has one method, as a name or {{name: knobs}}, got {value!r}")
    ((name, knobs),) = value.items()
    return str(name), dict(knobs or {})


def _made_inner(value: Any, tokenizer: Any, vocab_size: int | None) -> Any:
    if not isinstance(value, (str, Mapping)):
        return value  # a method, which the wrapper checks
    name, knobs = one_inner(value)
    return make(name, tokenizer, vocab_size, **knobs)


def parse_knobs(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Parse texts of the form ``knob=value`` to knobs for `make`.

    A value is a whole number, a number, ``true``, ``false``, ``none``, a text, or numbers with commas between them, as the
    knob's type allows. A number may be a fraction such as 1/8, which of a budget is a share of the prompt, as is 0.125
    (`kvjax.share`). Unknown methods and knobs pass; `make` refuses them.

    Args:
        method: a method's name; see `canonical_name`.
        pairs: the texts.

    Raises:
        ValueError: a text without "=", or a value of the wrong type.
    """
    cls = known().get(canonical_name(named.split_call(method)[0]))
    knobs: dict[str, Any] = {}
    for pair in pairs:
        knob, _, text = (part.strip() for part in pair.partition("="))
        if not knob or not text:
            raise ValueError(f"--set takes KNOB=VALUE, got {pair!r}")
        check_once([*knobs, knob], ", ".join(pairs))
        knobs[knob] = text if cls is None else _value(cls, knob, text)
    return knobs


def _value(cls: type[Method], knob: str, text: str) -> Any:
    """Convert ``text`` to a kind that the knob may have. No text can stand for an array or for tuples in a tuple."""
    if knob not in declared(cls):
        return text
    kinds, _, _ = declared(cls)[knob]
    if _SHARE.fullmatch(text) and (float in kinds or (knob == "budget" and int in kinds)):
        top, _, bottom = text.partition("/")
        part = float(top) / float(bottom or 1)
        return check_field(cls, knob, part) if float in kinds else share(part)
    if any(typing.get_origin(kind) is tuple is typing.get_origin(typing.get_args(kind)[0]) for kind in kinds):
        return text  # the name of a file with such tuples, which commands read; `make` refuses it
    try:
        value = _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # it is no number and no tuple
        if float in kinds and tuple[float, ...] in kinds:
            return text  # the name of a file, as above
        value = text
    return check_field(cls, knob, value)


def resolve(method: Method | str, length: int | None = None, room: int | None = None) -> Method:
    """Return the method itself, or make the method of that name with default knobs.

    Args:
        method: the method or its name.
        length: tokens of the prompt, of which a `kvjax.share` is a part; None refuses shares.
        room: see `kvjax.protocol.fields.at_length`.

    Raises:
        ValueError: see `make`; or a share without a length.
    """
    method = make(method) if isinstance(method, str) else check_method("method", method)
    if length is not None:
        return at_length(method, length, room)
    if has_shares(method):
        raise ValueError(f"a share is of a prompt, which is not known here: give budgets in tokens, got {describe(method)}")
    return method


def resolve_each(methods: Sequence[Method | str], length: int | None = None, room: int | None = None) -> list[Method]:
    """Apply `resolve` to every entry of a list, which must not be empty."""
    if isinstance(methods, str) or not isinstance(methods, Sequence):
        raise ValueError(f"methods must be a list of methods or names, got {shown(methods)}")
    if not methods:
        raise ValueError("methods must have at least one method, got none")
    return [resolve(method, length, room) for method in methods]


def knobs(cls: type[Method]) -> list[Knob]:
    """List the knobs of a method class, as its fields declare them."""
    return [
        Knob(
            name=field.name,
            default=field.default,
            traced=not field.metadata.get("static", False),
            doc=field.metadata.get("doc", "") + _MOVED * (field.name == "budget" and not field.metadata.get("static", False)),
        )
        for field in dataclasses.fields(cls)
    ]
