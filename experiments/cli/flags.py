"""The flags of a command, made from the fields of its settings; how a command ends.

A command has one or more dataclasses. Dataclasses that derive from `Settings` say what is measured: their fields are flags,
and keys of the YAML file that ``--config`` names. The other dataclasses say how a single call goes (where it writes, how it
shows results): their fields are flags only. A flag replaces the key of the same name. The flags follow from the fields:

* the flag's name is the field's, with dashes; `Option` can give another name, choices and more;
* a tuple takes its items with commas between them;
* a truth value that is False by default has the flag ``--name``; with the default True it has ``--no-name`` too;
* values by name take ``NAME=VALUE``, as often as wanted;
* the help text is the field's entry under "Attributes:" in the class' docstring.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from experiments.cli import types
from experiments.cli.compiled import CompiledPrograms
from experiments.cli.operations import Operations
from experiments.cli.settings import (
    FieldType,
    Settings,
    build,
    field_types,
    gone_from,
    option_of,
    read_yaml,
    refuse_unknown,
)

_MISSING = dataclasses.MISSING


class Parser(argparse.ArgumentParser):
    """A parser that refuses bad arguments with one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        """End the program with one line."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def run(
    job: Callable[..., int | None],
    *kinds: type,
    prog: str,
    about: str,
    argv: Sequence[str] | None = None,
    compiles: bool = False,
    models: bool = False,
) -> int:
    """Run a command: read its flags, call the job, turn errors into one line.

    Args:
        job: takes an instance of each of `kinds`; it returns an exit code, or None for 0.
        kinds: the dataclasses of the command.
        prog: the command as users write it, such as "kvjax eval".
        about: a sentence for the help.
        argv: arguments without the program's name; None takes the process's.
        compiles: whether the command compiles long programs without reporting the compile time. Then the programs are kept
            on disk, and the command has the flags ``--no-cache`` and ``--implementation``.
        models: whether the command runs models. Then it has the flag ``--implementation``.

    Returns:
        The exit code: 0, 2 for bad input, 130 when interrupted, or the job's own.
    """

    def start() -> int | None:
        if not (models or compiles):
            return job(*parse(kinds, argv, prog=prog, about=about))
        kept = (CompiledPrograms,) if compiles else ()
        made = parse((*kinds, Operations, *kept), argv, prog=prog, about=about)
        given, operations, keeping = made[: len(kinds)], made[len(kinds)], made[len(kinds) + 1 :]
        for programs in keeping:
            programs.switch_on()
        with operations.in_force():
            return job(*given)

    return guarded(start)


def guarded(job: Callable[[], int | None]) -> int:
    """Call a job; turn errors that users can cause into one line on standard error and an exit code."""
    try:
        code = job()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except ImportError as error:
        if _is_interrupt(error):
            return _say("interrupted", 130)
        if not isinstance(error, ModuleNotFoundError):
            raise
        return _say(f"error: {_one_line(error)}", 2)
    except BrokenPipeError:  # the reader went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError, OverflowError, FloatingPointError, NotImplementedError) as error:
        return _say(f"error: {_one_line(error)}", 2)
    except RuntimeError as error:  # it is the base of JAX's error; this file does not import JAX
        if type(error).__name__ != "JaxRuntimeError" or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _say(f"error: the device ran out of memory; use fewer or shorter prompts ({_one_line(error)[:200]})", 2)
    return code or 0


def _is_interrupt(error: BaseException | None) -> bool:
    """Tell whether an error comes from an interrupt: a compiled module interrupted at its start raises ImportError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _one_line(error: BaseException) -> str:
    """Return the error's message in one line, without the number of a system's error."""
    text = re.sub(r"^\[Errno \d+\] ", "", str(error))
    return " ".join(text.split()) or type(error).__name__


def _say(text: str, code: int) -> int:
    print(f"kvjax: {text}", file=sys.stderr, flush=True)
    return code


def parse(kinds: Sequence[type], argv: Sequence[str] | None, *, prog: str, about: str) -> list[Any]:
    """Build an instance of each dataclass from the command line; see `run`.

    Raises:
        SystemExit: the flags are bad (exit code 2), or ask for help (exit code 0).
        ValueError: the settings refuse a value.
    """
    parser = make_parser(kinds, prog=prog, about=about)
    given = vars(parser.parse_args(argv))
    config: pathlib.Path | None = given.pop("config", None)
    keys = [field.name for kind in kinds if issubclass(kind, Settings) for field in dataclasses.fields(kind)]
    stored = {} if config is None else read_yaml(config)
    where = "the command line" if config is None else str(config)
    refuse_unknown(stored, keys, where, gone_from(*kinds))
    made, missing = [], []
    for kind in kinds:
        types_of, mine = field_types(kind), {}
        for field in dataclasses.fields(kind):
            name = field.name
            if name in given:
                mine[name] = _flag_value(given[name], types_of[name], stored.get(name))
            elif name in stored and name in keys:
                mine[name] = stored[name]
            elif field.default is _MISSING and field.default_factory is _MISSING:
                missing.append(flag_of(field))
        made.append(mine)
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return [build(kind, mine, where) for kind, mine in zip(kinds, made, strict=True)]


def _flag_value(value: Any, kind: FieldType, stored: Any) -> Any:
    """Return the value of a flag; values by name are merged into the file's values by name."""
    if not kind.is_mapping:
        return value
    merged = dict(stored or {})
    for part in value:
        merged |= part
    return merged


def make_parser(kinds: Sequence[type], *, prog: str, about: str) -> Parser:
    """Make the parser whose flags are the fields of some dataclasses; a flag that is not given leaves no value."""
    parser = Parser(prog=prog, description=about, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    if any(issubclass(kind, Settings) for kind in kinds):
        parser.add_argument(
            "--config", type=pathlib.Path, help="a YAML file of settings by name (flags go before its values)"
        )
    groups: dict[str, Any] = {}
    apart = len({issubclass(kind, Settings) for kind in kinds}) > 1
    call = parser.add_argument_group("this call", "how it runs, and where its results go") if apart else parser
    what = parser.add_argument_group("settings", "what is run; also keys of the YAML file of --config") if apart else parser
    for kind in kinds:
        told, types_of = attribute_docs(kind), field_types(kind)
        for field in dataclasses.fields(kind):
            group, place = option_of(field).group, what if issubclass(kind, Settings) else call
            if group and group not in groups:
                groups[group] = place.add_mutually_exclusive_group()
            _add_flag(groups[group] if group else place, field, types_of[field.name], told.get(field.name, ""))
    return parser


def flag_of(field: dataclasses.Field) -> str:
    """Return the flag of a field, or the field's name if its value is positional on the command line."""
    option = option_of(field)
    return field.name if option.positional else "--" + (option.flag or field.name.replace("_", "-"))


def _add_flag(parser: Any, field: dataclasses.Field, kind: FieldType, told: str) -> None:
    option = option_of(field)
    more: dict[str, Any] = {"help": _help(field, told)}
    if kind.kinds and kind.kind is bool and not kind.is_tuple:
        action = "store_true" if field.default is False else argparse.BooleanOptionalAction
        parser.add_argument(flag_of(field), dest=field.name, action=action, default=argparse.SUPPRESS, **more)
        return
    if option.choices:
        more["choices"] = None if kind.is_tuple else option.choices
    if option.metavar is not None:
        more["metavar"] = option.metavar
    if option.positional:
        if kind.is_tuple and option.parse is None:  # a parser makes the whole tuple of a single text
            more["nargs"] = "*" if field.default is not _MISSING else "+"
        elif field.default is not _MISSING:
            more["nargs"] = "?"
        parser.add_argument(field.name, type=option.parse or kind.kind, default=argparse.SUPPRESS, **more)
        return
    if kind.is_mapping:
        more |= {"action": "append", "type": option.parse or types.pair}
        more.setdefault("metavar", "NAME=VALUE")
    elif kind.is_tuple and option.several:
        more |= {"nargs": "*", "type": option.parse or kind.kind}
    elif kind.is_tuple and option.repeat:
        more |= {"action": "append", "type": option.parse or kind.kind}
    elif kind.is_tuple:
        more["type"] = option.parse or functools.partial(types.items, kind.kind)
    else:
        more["type"] = option.parse or kind.kind
    parser.add_argument(flag_of(field), dest=field.name, **more)


def _help(field: dataclasses.Field, told: str) -> str:
    """Return the help text, with the default if there is one to show."""
    default = field.default
    if default is _MISSING and field.default_factory is _MISSING and not option_of(field).positional:
        told += " (required)"
    if "(default" in told or default is _MISSING or isinstance(default, bool) or default in (None, (), ""):
        shown = ""
    else:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return (told + (f" (default {shown})" if shown else "")).replace("%", "%%")


def attribute_docs(cls: type) -> dict[str, str]:
    """Collect the entries under "Attributes:" in the docstrings of a dataclass and its bases, one line for each field."""
    docs: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        text = inspect.cleandoc(owner.__doc__ or "")
        section = re.search(r"^Attributes:\n((?:[ \t]+.*\n?|\n)*)", text, re.MULTILINE)
        if section is None:
            continue
        for name, said in re.findall(r"^    (\w+): ((?:.*\n?)(?:^     +.*\n?)*)", section.group(1), re.MULTILINE):
            docs[name] = " ".join(said.split())
    return docs
