"""Plug-ins, which are methods outside of kvjax: given to `register`, announced by a package, or named by a path.

A package announces its methods by entry points of the group ``kvjax.methods``, in its pyproject.toml::

    [project.entry-points."kvjax.methods"]
    spread = "my_package.spread:Spread"

A path is ``package.module:Class``. However a method is found, its name is its class name in lower case. The classes that
`register` was given are the only state of this library; they are forgotten when the process ends.
"""

import functools
import importlib
import importlib.metadata
import inspect
import operator
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from kvjax import methods
from kvjax.protocol.fields import nearest, shown
from kvjax.protocol.method import Method
from kvjax.wrappers.named import WRAPPERS

_GROUP = "kvjax.methods"
_registered: dict[str, type[Method]] = {}


def builtin() -> dict[str, type[Method]]:
    """Return the classes that `kvjax.methods` imports, by lower-case name."""
    return {name.lower(): cls for name, cls in vars(methods).items() if inspect.isclass(cls) and issubclass(cls, Method)}


def outside() -> dict[str, type[Method]]:
    """Return the classes of all known plug-ins, by lower-case name."""
    return {**_announced(), **_registered}


def register[M: Method](cls: type[M]) -> type[M]:
    """Make a method known by name, as `kvjax.make` and the commands of ``kvjax`` take it; also a decorator above ``@pytree``.

    A class that is defined again (a notebook's cell that is run twice) replaces the class of the same module and name.

    Args:
        cls: a final class; its name in lower case becomes the method's name.

    Returns:
        ``cls``.

    Raises:
        TypeError: ``cls`` is no subclass of `kvjax.protocol.method.Method`, is abstract, or is not decorated with
            `kvjax.protocol.typing.pytree`.
        ValueError: a built-in method, which is refused itself, or a class of another module has the name.
    """
    if any(cls is one for one in _of_kvjax().values()):
        raise ValueError(f"expected a method that kvjax does not have, got its own {cls.__name__}")
    _add(cls, _registered)
    return cls


def load(path: str) -> type[Method]:
    """Import and register the method class that a path names.

    Its module is looked up on the search path, and then in the current directory.

    Args:
        path: ``package.module:Class``.

    Raises:
        ValueError: there is no such module, or it has no such class, or the class is no method that can be run.
    """
    cls = named_by(path, "class")
    try:
        return cls if cls in _of_kvjax().values() else register(cls)
    except TypeError as error:  # a path is text that a user wrote; commands turn a ValueError into one line
        raise ValueError(f"{path!r} names no method: {error}") from error


def named_by(path: str, what: str) -> Any:
    """Import what a path ``package.module:name`` names; its module may lie in the current directory.

    Args:
        path: the path.
        what: what the name stands for, for messages: "class" or "function".

    Raises:
        ValueError: the path has another form, or there is no such module, or it has no such name.
    """
    module_name, _, name = path.strip().partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), *name.split("."))):
        kind = "method" if what == "class" else what
        raise ValueError(f"a {kind} outside of kvjax is named package.module:{what.capitalize()}, got {path!r}")
    module = _import(module_name, path)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        near = nearest(name, vars(module))
        raise ValueError(f"the module {module_name!r} has no {what} {name!r}{near}, which {path!r} names") from error


def check_hooks(cls: type) -> None:
    """Refuse a class with a function that cannot take the arguments of the function that it replaces.

    Raises:
        TypeError: the message names the function, and the arguments of both.
    """
    for name, hook in vars(cls).items():
        replaced = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
        if name.startswith("__") or not (inspect.isfunction(hook) and inspect.isfunction(replaced)):
            continue
        expected, signature = inspect.signature(replaced).parameters, inspect.signature(hook)
        named = [one.name for one in expected.values() if one.kind is inspect.Parameter.KEYWORD_ONLY]
        places = [one.name for one in expected.values() if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        try:
            signature.bind(*places, **dict.fromkeys(named))
        except TypeError as error:
            must = f"must take ({', '.join(expected)}), as {replaced.__qualname__} does"
            raise TypeError(f"{cls.__name__}.{name} {must}, got ({', '.join(signature.parameters)})") from error


def class_path(cls: type) -> str:
    """Return the path of a class, ``package.module:Class``."""
    return f"{cls.__module__}:{cls.__qualname__}"


def path_of(cls: type) -> str | None:
    """Return the path of the class of a plug-in or a wrapper; None if it is a class of `kvjax.methods`, or not known."""
    return class_path(cls) if cls in (*outside().values(), *WRAPPERS.values()) else None


def _of_kvjax() -> dict[str, type[Method]]:
    """Return the classes that kvjax has, by lower-case name."""
    return {**WRAPPERS, **builtin()}


def _import(name: str, path: str) -> Any:
    """Import a module. A module of the current directory hides no other module, and the search path stays as it was."""
    kept = list(sys.path)
    sys.path.append(os.getcwd())
    importlib.invalidate_caches()  # the file may be younger than the last look into the directory
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another one
        raise ValueError(f"there is no module {error.name!r}, which {path!r} needs") from error
    finally:
        sys.path[:] = kept


def _add(cls: Any, known: dict[str, type[Method]]) -> None:
    """Add a class to ``known`` under its name; refuse a class that is no method that can be run."""
    if not (inspect.isclass(cls) and issubclass(cls, Method)):
        raise TypeError(f"a method must be a subclass of kvjax.protocol.method.Method, got {shown(cls)}")
    if missing := sorted(cls.__abstractmethods__):
        raise TypeError(f"a method must be a final class, got {cls.__name__}, which lacks {', '.join(missing)}")
    if "__dataclass_fields__" not in vars(cls):
        raise TypeError(f"a method must be decorated with kvjax.protocol.typing.pytree, got {cls.__name__} without it")
    check_hooks(cls)
    name = cls.__name__.lower()
    other = _of_kvjax().get(name) or known.get(name)
    if other is not None and class_path(other) != class_path(cls):
        raise ValueError(f"the method name {name!r} belongs to {class_path(other)}, got {class_path(cls)}: rename the class")
    known[name] = cls


@functools.cache
def _announced() -> Mapping[str, type[Method]]:
    """Load the methods of installed packages. A method that cannot be used is left out with a warning."""
    methods: dict[str, type[Method]] = {}
    for entry in importlib.metadata.entry_points(group=_GROUP):
        try:
            _add(entry.load(), methods)
        except Exception as error:  # whatever happens in a foreign module
            text = f"the method {entry.value!r} of an installed package is left out: {type(error).__name__}: {error}"
            warnings.warn(text, stacklevel=2)
    return methods
