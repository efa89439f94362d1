"""Settings of a job: one frozen dataclass, whose fields are the keys of a YAML file and the flags of a command."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self


@dataclasses.dataclass(frozen=True)
class Option:
    """More about a field than its name, type and default.

    Attributes:
        choices: the values that are allowed; none allows all.
        flag: the flag's name without its dashes, if it differs from the field's.
        metavar: how help names the value.
        parse: converts the flag's text to the field's value; None converts by the field's type.
        read: converts a value in a mapping to the field's value; None checks the value's type.
        write: converts the field's value to a YAML value; None converts by the value's type.
        repeat: the flag can be given several times, each time with an item of the tuple.
        several: the flag takes several items of the tuple, with spaces between them.
        positional: the value is given on the command line without a flag.
        group: flags of the same group exclude each other.
    """

    choices: tuple[Any, ...] = ()
    flag: str = ""
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    read: Callable[[Any], Any] | None = None
    write: Callable[[Any], Any] | None = None
    repeat: bool = False
    several: bool = False
    positional: bool = False
    group: str = ""


_PLAIN = Option()


def option(
    default: Any = dataclasses.MISSING,
    *,
    factory: Any = dataclasses.MISSING,
    choices: Sequence[Any] = (),
    **about: Any,
) -> Any:
    """Declare a field of a settings dataclass, with more about its flag.

    Args:
        default: the field's default; without a default and a factory the setting must be given.
        factory: makes the default, for mutable types.
        choices: the values that are allowed.
        **about: other fields of `Option`.
    """
    metadata = {"option": Option(choices=tuple(choices), **about)}
    return dataclasses.field(default=default, default_factory=factory, metadata=metadata)


def option_of(field: dataclasses.Field) -> Option:
    """Return the `Option` of a field; the default `Option` if the field was declared without `option`."""
    return field.metadata.get("option", _PLAIN)


@dataclasses.dataclass(frozen=True)
class FieldType:
    """The type of a field, taken apart.

    Attributes:
        kinds: the types of a value, or of an item of a tuple; None's type is among them if the value may be None.
        is_tuple: whether the field holds a tuple of such values.
        is_mapping: whether the field holds values by name, of any types.
    """

    kinds: tuple[type, ...]
    is_tuple: bool = False
    is_mapping: bool = False

    @property
    def kind(self) -> type:
        """The first type other than None's."""
        return next(kind for kind in self.kinds if kind is not type(None))


def field_types(cls: type) -> dict[str, FieldType]:
    """Return the types of a dataclass' fields, by name."""
    hints = typing.get_type_hints(cls)
    return {field.name: _field_type(hints[field.name]) for field in dataclasses.fields(cls)}


def _field_type(hint: Any) -> FieldType:
    parts = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    if any(part is Mapping or typing.get_origin(part) is Mapping for part in parts):
        return FieldType((), is_mapping=True)
    tuples = [typing.get_args(part) for part in parts if typing.get_origin(part) is tuple]
    if tuples:
        inner = tuples[0][0]
        return FieldType(typing.get_args(inner) or (inner,), is_tuple=True)
    return FieldType(tuple(parts))


@dataclasses.dataclass(frozen=True)
class Settings:
    """The base of every job's settings.

    A subclass is a frozen dataclass that explains its fields under "Attributes:" in its docstring. It refuses bad values in
    ``__post_init__`` by a ``ValueError``.
    """

    gone: ClassVar[Mapping[str, str]] = {}  # name of a removed setting -> what to do instead

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], where: str) -> Self:
        """Build settings from values by name; the fields that are not given keep their defaults.

        Args:
            given: values as a YAML file holds them.
            where: the file or the command line, for messages.

        Raises:
            ValueError: a name is unknown, a value is missing or of a wrong type, or the settings refuse a value.
        """
        return build(cls, given, where)

    @classmethod
    def from_yaml(cls, path: pathlib.Path) -> Self:
        """Read settings from a YAML file.

        Raises:
            ValueError: see `from_mapping`; or the file is no YAML.
            FileNotFoundError: the file does not exist.
            ModuleNotFoundError: PyYAML is not installed.
        """
        return cls.from_mapping(read_yaml(path), str(path))

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a YAML file holds them; JSON values."""
        made = {}
        for field in dataclasses.fields(self):
            value, write = vars(self)[field.name], option_of(field).write
            made[field.name] = _plain(value) if write is None else write(value)
        return made

    def to_yaml(self) -> str:
        """Write the settings as the text of a YAML file."""
        return write_yaml(self.as_dict())


def build(cls: type, given: Mapping[str, Any], where: str) -> Any:
    """Build an instance of a dataclass from values by name; see `Settings.from_mapping`."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    kinds = field_types(cls)
    made: dict[str, Any] = {}
    refuse_unknown(given, list(fields), where, gone_from(cls))
    for name, value in given.items():
        read = option_of(fields[name]).read
        try:
            made[name] = checked(name, value, kinds[name]) if read is None else read(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        _check_choice(name, made[name], option_of(fields[name]).choices, where)
    for name, field in fields.items():
        if name not in made and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{where}: the setting {name!r} must be given")
    return cls(**made)


def gone_from(*classes: type) -> dict[str, str]:
    """Merge `Settings.gone` of some dataclasses; dataclasses that are no `Settings` are skipped."""
    return {name: told for cls in classes if issubclass(cls, Settings) for name, told in cls.gone.items()}


def refuse_unknown(given: Mapping[str, Any], known: Sequence[str], where: str, gone: Mapping[str, str]) -> None:
    """Refuse names that are no setting; the message gives the nearest known name, or the advice in ``gone``."""
    for name in given:
        if name in gone:
            raise ValueError(f"{where}: the setting {name!r} is gone: {gone[name]}")
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ","
            raise ValueError(f"{where}: unknown setting {name!r}{hint} expected some of {', '.join(known)}")


def checked(name: str, value: Any, kind: FieldType) -> Any:
    """Convert a value as YAML holds it to a field's type.

    A single value becomes a tuple where a tuple is expected, and a text becomes a path. A number becomes a text where a tuple
    of texts is expected (a budget of 256).

    Raises:
        ValueError: the value has another type.
    """
    if kind.is_mapping:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be values by name, got {value!r}")
        return dict(value)
    if kind.is_tuple:
        value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        return tuple(_item(name, item, kind.kinds, in_tuple=True) for item in value)
    return _item(name, value, kind.kinds, in_tuple=False)


def _item(name: str, value: Any, kinds: Sequence[type], in_tuple: bool) -> Any:
    if in_tuple and str in kinds and type(value) in (int, float):
        return str(value)
    if pathlib.Path in kinds and isinstance(value, (str, pathlib.Path)):
        return pathlib.Path(value)
    kinds = [*kinds, *([int] if float in kinds and int not in kinds else [])]
    if not isinstance(value, tuple(kinds)) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    return value


def _check_choice(name: str, value: Any, choices: tuple[Any, ...], where: str) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        if choices and item is not None and item not in choices:
            raise ValueError(f"{where}: {name} must be one of {', '.join(map(str, choices))}, got {item!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, pathlib.Path) else value


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """Read the mapping in a YAML file.

    Raises:
        ValueError: the file holds no mapping, is no YAML, or has a key twice.
        FileNotFoundError: the file does not exist.
        ModuleNotFoundError: PyYAML is not installed.
    """
    try:
        found = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold settings by name, got {type(found).__name__}")
    return found


def parse_yaml(text: str) -> Any:
    """Parse the value in a YAML text; None if the text is empty.

    Raises:
        ValueError: the text is no YAML, is nested too deeply, or has a key twice. (PyYAML would take the last one.)
        ModuleNotFoundError: PyYAML is not installed.
    """
    yaml = _yaml()

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            lines: dict[Any, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if isinstance(key.value, str) and lines.setdefault((key.tag, key.value), line) != line:
                    raise ValueError(f"expected keys once, got {key.value!r} in lines {lines[key.tag, key.value]} and {line}")
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # Loader is a SafeLoader too: it makes only plain values
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def write_yaml(values: Mapping[str, Any]) -> str:
    """Write values by name as the text of a YAML file, in their order."""
    return _yaml().safe_dump(dict(values), sort_keys=False, allow_unicode=True)


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "settings are written as YAML by the package 'pyyaml', which is not installed; "
            "it belongs to kvjax (pip install pyyaml)"
        ) from error
    return yaml
