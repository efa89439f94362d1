"""Settings of a job: frozen dataclasses, whose fields are the flags of a command and the keys of its YAML file.

jsonargparse reads and checks the values. This file adds what its flags lack: commas between the items of a tuple, and the
help text of a field, which is the entry under "Attributes:" in the docstring of its class.
"""

import argparse
import dataclasses
import difflib
import functools
import inspect
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jsonargparse
from jsonargparse.typing import NonNegativeInt, PositiveInt

from experiments.cli.yaml_text import read_yaml, write_yaml


@dataclasses.dataclass(frozen=True)
class Option:
    """More about a field than its name, type and default.

    Attributes:
        choices: the values that are allowed; none allows all.
        flag: the flag's name without its dashes, if it differs from the field's.
        metavar: how help names the value.
        read: converts a flag's text, or a value of a YAML file, to the field's value, and leaves the field's value as it is;
            None converts by the field's type.
        write: converts the field's value to a YAML value; None converts by the value's type.
        repeat: the flag can be given several times, each time with an item of the tuple.
        several: the flag takes several items of the tuple, with spaces between them.
        positional: the value is given on the command line without a flag.
    """

    choices: tuple[Any, ...] = ()
    flag: str = ""
    metavar: str | None = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    repeat: bool = False
    several: bool = False
    positional: bool = False


_MISSING = dataclasses.MISSING
_WORDS = {"int": "whole numbers", "PositiveInt": "whole numbers of at least 1", "float": "numbers"}


def option(default: Any = _MISSING, *, factory: Any = _MISSING, choices: Sequence[Any] = (), **about: Any) -> Any:
    """Declare a field of a settings dataclass; ``about`` are other fields of `Option`."""
    metadata = {"option": Option(choices=tuple(choices), **about)}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def option_of(field: dataclasses.Field) -> Option:
    """Return the `Option` of a field; the default `Option` if the field was declared without `option`."""
    return field.metadata.get("option", Option())


def flag_of(field: dataclasses.Field) -> str:
    """Return the flag of a field, or the field's name if its value is positional on the command line."""
    about = option_of(field)
    return field.name if about.positional else "--" + (about.flag or field.name.replace("_", "-"))


@dataclasses.dataclass(frozen=True)
class Settings:
    """The base of settings that are stored beside results.

    A subclass is a frozen dataclass that explains its fields under "Attributes:" in its docstring. It refuses bad values in
    ``__post_init__`` by a ``ValueError``.
    """

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str) -> Self:
        """Build settings from values by name, as the YAML file ``where`` holds them; the other fields keep their defaults.

        Unknown names, missing values and values that the settings refuse are a ``ValueError``.
        """
        try:
            return parse([cls], [], values=values, where=where)[0]
        except argparse.ArgumentError as error:
            raise ValueError(f"{where}: {error}") from error

    @classmethod
    def from_yaml(cls, path: pathlib.Path) -> Self:
        """Read settings from a YAML file; see `from_mapping`."""
        return cls.from_mapping(read_yaml(path), str(path))

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a YAML file holds them; JSON values."""
        writers = {field.name: option_of(field).write or _plain for field in dataclasses.fields(self)}
        return {name: write(vars(self)[name]) for name, write in writers.items()}

    def to_yaml(self) -> str:
        """Write the settings as the text of a YAML file."""
        return write_yaml(self.as_dict())


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, pathlib.Path) else value


def parse(
    kinds: Sequence[type],
    argv: Sequence[str] | None,
    *,
    values: Mapping[str, Any] | None = None,
    where: str = "the command line",
    prog: str | None = None,
    about: str = "",
) -> list[Any]:
    """Build an instance of each dataclass from flags and values by name; a flag replaces the value of its name.

    The values are those of a YAML file, by default of the file that ``--config`` names; ``where`` names it in messages.

    Raises:
        SystemExit: the flags ask for help.
        argparse.ArgumentError: a bad flag or value.
        ValueError: an unknown name in the YAML file, or the settings refuse a value.
    """
    fields = {field.name: field for kind in kinds for field in dataclasses.fields(kind)}
    if values is None:
        file = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        file.add_argument("--config", type=pathlib.Path)
        path = file.parse_known_args(argv)[0].config
        values, where = ({}, where) if path is None else (read_yaml(path), str(path))
    if {"-h", "--help"} & {*(sys.argv[1:] if argv is None else argv)}:
        make_parser(kinds, prog=prog, about=about, for_help=True).parse_args(["--help"])
    parser = make_parser(kinds, prog=prog, about=about)
    hints = {name: hint for kind in kinds for name, hint in typing.get_type_hints(kind).items()}
    for name, value in values.items():
        if name not in fields:
            known = f"{nearest(str(name), fields)}, expected some of {', '.join(fields)}"
            raise ValueError(f"{where}: unknown setting {name!r}{known}")
        # jsonargparse takes None for a value that is not given
        if value is None and option_of(fields[name]).read is None and types.NoneType not in _parts(hints[name]):
            raise ValueError(f"{where}: {name} must have a value, got none")
    try:
        before = parser.parse_object(dict(values))
        parsed = parser.parse_args(argv, namespace=before.clone())
    except argparse.ArgumentError as error:
        flags = [flag_of(field) for field in fields.values()]
        first = next((flag_of(fields[name]) for kind in kinds[:1] for name in kind.__annotations__ if name in fields), "")
        raise argparse.ArgumentError(None, _sentence(str(error), flags, first)) from error
    for name in values:
        if option_of(fields[name]).positional and parsed[name] in (None, []):  # argparse gives it, absent or not
            parsed[name] = before[name]
    required = [field for field in fields.values() if field.default is _MISSING and field.default_factory is _MISSING]
    if missing := [flag_of(field) for field in required if parsed[field.name] in (None, [])]:
        raise argparse.ArgumentError(None, f"the following arguments are required: {', '.join(missing)}")
    for name, field in fields.items():
        if isinstance(field.default, bool) and not isinstance(parsed[name], bool):
            raise ValueError(f"{where}: {name} must be true or false, got {parsed[name]!r}")
        if isinstance(parsed[name], list):
            parsed[name] = tuple(parsed[name])
        if isinstance(parsed[name], (PositiveInt, NonNegativeInt)):  # a class of its own, which YAML cannot write
            parsed[name] = int(parsed[name])
    return [kind(**{field.name: parsed[field.name] for field in dataclasses.fields(kind)}) for kind in kinds]


def nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """Return ", did you mean ...?" with the known name that is most like a name; "" if none is like it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _sentence(message: str, flags: Sequence[str], first: str) -> str:
    """Shorten what jsonargparse says to a sentence that names the flag and the value; ``first`` is the command's own flag."""
    message = re.sub(r'^Parser key "(\w+)":', lambda key: f"{key[1].replace('_', '-')}:", " ".join(message.split()))
    message = re.sub(r"Does not validate .*Subtypes: \[(.*)\] Errors: .*Given value:", r"Expected \1, got", message)
    message = re.sub(r"<class '([\w.]+)'>", lambda kind: kind[1].rpartition(".")[2].replace("NoneType", "none"), message)
    message = message.replace("Expected PositiveInt, none", "expected a whole number of at least 1")
    limits = {"Positive": "at least 1", "NonNegative": "at least 0"}
    message = re.sub(r"Not of type (\w+)Int: (.*)", lambda x: f"expected a whole number of {limits[x[1]]} ({x[2]})", message)
    message = message.replace("Expected a ", "expected ").replace(". Got value:", ", got")
    unknown = re.search(r"unrecognized arguments: (\S+)", message)
    if unknown and not unknown[1].startswith("-") and first.startswith("-"):
        return f"{unknown[1]!r} has no flag before it, expected one such as {first}"
    return message + (nearest(unknown[1], flags) if unknown else "")


def make_parser(
    kinds: Sequence[type], *, prog: str | None = None, about: str = "", for_help: bool = False
) -> jsonargparse.ArgumentParser:
    """Make the parser whose flags are the fields of some dataclasses; only help requires what a file may give, too."""
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        description=about,
        allow_abbrev=False,
        exit_on_error=False,
        default_env=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if any(issubclass(kind, Settings) for kind in kinds):
        parser.add_argument("--config", help="a YAML file of flags by name (flags go before its values)")
    for kind in kinds:
        docs, hints = attribute_docs(kind), typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            _add_flag(parser, field, hints[field.name], docs.get(field.name, ""), for_help)
    return parser


def _add_flag(parser: jsonargparse.ArgumentParser, field: dataclasses.Field, hint: Any, doc: str, for_help: bool) -> None:
    about = option_of(field)
    default = field.default if field.default_factory is _MISSING else field.default_factory()
    is_required = default is _MISSING
    must_stand = about.positional and is_required and for_help
    shown = default if about.write is None else tuple(about.write(default))
    more: dict[str, Any] = {"help": _help(doc, shown, is_required)}
    more["default"] = None if is_required else list(default) if isinstance(default, tuple) and about.read is None else default
    if about.metavar is not None:
        more["metavar"] = about.metavar
    kinds = [part for part in _parts(hint) if part is not types.NoneType]
    is_tuple, is_mapping = (typing.get_origin(kinds[0]) is kind for kind in (tuple, Mapping))
    item = typing.get_args(kinds[0])[0] if is_tuple or is_mapping else None
    if kinds == [bool]:
        action = "store_true" if default is False else argparse.BooleanOptionalAction
        parser.add_argument(flag_of(field), dest=field.name, action=action, **more)
        return
    if is_mapping:
        more = {"metavar": "NAME=VALUE", **more, "action": _Merge, "type": pair}
    elif about.repeat:
        more["action"] = "append"
    elif is_tuple and (about.several or about.positional) and about.read is None:
        more |= {"nargs": "+" if must_stand else "*", "type": item}
    elif about.read is not None:
        more["type"] = _refusing(about.read)
    elif is_tuple:
        more["type"] = _refusing(functools.partial(items, item, choices=about.choices))
    elif about.choices:
        more["type"] = _refusing(functools.partial(_one_of, about.choices, types.NoneType in _parts(hint)))
        more.setdefault("metavar", f"{{{','.join(str(choice) for choice in about.choices if choice is not None)}}}")
    else:
        more["type"] = hint
    if must_stand:
        del more["default"]
        parser.add_argument(field.name, **more)
    elif about.positional:
        parser.add_argument(field.name, **{"nargs": "?", **more})
    else:
        parser.add_argument(flag_of(field), dest=field.name, **more)


def _parts(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)


class _Merge(argparse.Action):
    """Adds values by name to those before them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest, None) or {}), **values})


class _RefusedError(argparse.ArgumentTypeError, ValueError):
    """A value that a reader refuses; argparse shows the message of an ``ArgumentTypeError`` only."""


def _refusing(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def reader(value: Any) -> Any:
        try:
            return read(value)
        except ValueError as error:
            raise _RefusedError(str(error)) from error

    return reader


def _help(doc: str, default: Any, is_required: bool) -> str:
    """Return the help text, with the default if there is one to show."""
    if is_required:
        return f"{doc} (required)".replace("%", "%%")
    if "(default" in doc or default is _MISSING or isinstance(default, bool) or default in (None, (), "", {}):
        return doc.replace("%", "%%")
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f"{doc} (default {shown})".replace("%", "%%")


def attribute_docs(cls: type) -> dict[str, str]:
    """Collect the entries under "Attributes:" in the docstrings of a dataclass and its bases, one line for each field."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)*)", inspect.cleandoc(owner.__doc__ or ""), re.MULTILINE)
        entries = section[1] if section else ""
        for name, text in re.findall(r"^    (\w+): ((?:.*\n?)(?:^     +.*\n?)*)", entries, re.MULTILINE):
            docs[name] = " ".join(text.split())
    return docs


def names(text: str | Sequence[str]) -> tuple[str, ...]:
    """Split comma-separated names. Commas within round brackets, as in ``periodic(snapkv, interval=128)``, split nothing."""
    if not isinstance(text, str):
        return tuple(text)
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    parts = tuple(part.strip() for part in parts)
    if not all(parts) or depth:
        raise ValueError(f"expected comma-separated values, got {text!r}")
    return parts


def items(kind: type, value: Any, choices: Sequence[Any] = ()) -> tuple:
    """Read items of one type from a text with commas between them, or from a value or a list of a YAML file."""
    values = names(value) if isinstance(value, str) else value if isinstance(value, (list, tuple)) else (value,)
    results = []
    for item in values:
        try:
            if isinstance(item, bool) or not isinstance(item, (str, int, float, pathlib.Path)):
                raise ValueError("no item")
            value = kind(str(item))
            results.append(int(value) if kind is PositiveInt else value)
        except ValueError as error:
            words = _WORDS.get(kind.__name__, "names")
            raise ValueError(f"expected {words} with commas between them, got {str(item)!r}") from error
        _one_of(choices, False, results[-1])
    return tuple(results)


def _one_of(choices: Sequence[Any], may_be_none: bool, value: Any) -> Any:
    if choices and value not in choices and not (may_be_none and value is None):
        raise ValueError(f"expected one of {', '.join(map(str, choices))}, got {value!r}")
    return value


def pair(text: str | Mapping[str, Any]) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` as one value by name; true, false and none become Python's values, all else is text.

    Raises:
        argparse.ArgumentTypeError: a text of another form.
    """
    if isinstance(text, Mapping):
        return dict(text)
    name, equals, value = str(text).partition("=")
    if not equals or not name.strip():
        raise _RefusedError(f"expected NAME=VALUE, got {text!r}")
    return {name.strip(): {"true": True, "false": False, "none": None}.get(value.lower(), value)}


def record_path(value: str | pathlib.Path) -> pathlib.Path:
    """Read the path of a JSON record; its table and its figure get the same name with other suffixes.

    Raises:
        ValueError: the path is no ``.json``, or see `output_file`.
    """
    if pathlib.Path(value).suffix != ".json":
        raise ValueError(f"expected a file that ends in .json, got {str(value)!r}")
    return output_file(value)


def output_file(value: str | pathlib.Path) -> pathlib.Path:
    """Read the path of a file that a run ends with.

    Raises:
        ValueError: no file can be written there, which a run would find out at its end.
    """
    path = pathlib.Path(value)
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if path.is_dir() or not above.is_dir():
        raise ValueError(f"expected a file in a folder, got {path}, where {path if path.is_dir() else above} is in the way")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"expected a file in a folder that may be written, got {path}")
    return path


def output_folder(value: str | pathlib.Path) -> pathlib.Path:
    """Read the path of a folder that a run fills; "" is none, and `output_file` says what else is refused."""
    if not str(value):
        raise ValueError("expected a folder, got ''")
    return output_file(pathlib.Path(value) / "metrics.json").parent
