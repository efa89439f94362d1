"""The package's home for models: every name of the package ``models``, which has one decoder and readers of checkpoints.

``kvjax.models.load("builtin")`` is ``models.load("builtin")``. The two packages do not know each other; this module alone
imports ``models``, when a name is asked for, and says which file hides it if there is another module of that name.
"""

import functools
import importlib.util
import pathlib
import sys
import types
from typing import Any

_HOME = pathlib.Path(__file__).resolve().parents[2]  # our packages lie beside each other


def hidden(name: str) -> str | None:
    """Describe the foreign module that hides one of our packages, or that the package is missing; None if all is well.

    Args:
        name: "models" or "experiments".
    """
    if name in sys.modules:
        known = vars(sys.modules[name])
        places, file = known.get("__path__", ()), known.get("__file__")
    else:
        spec = importlib.util.find_spec(name)
        places = () if spec is None else spec.submodule_search_locations or ()
        file = None if spec is None else spec.origin
    folders = [pathlib.Path(place).resolve() for place in places]
    if _HOME / name in folders:
        return None
    other = next(iter(folders), None) or file
    what = f"{other} hides it: rename that, or take its directory off the search path" if other else "it is missing"
    return f"kvjax needs its own package {name!r} in {_HOME}, but {what}"


@functools.cache
def _ours() -> types.ModuleType:
    """Import the package ``models`` that lies beside kvjax.

    Raises:
        ImportError: another module has its name, or it is missing.
    """
    if reason := hidden("models"):
        raise ImportError(reason)
    import models

    return models


def __getattr__(name: str) -> Any:
    """Take a name of the package ``models``, which is imported when the first name is asked for."""
    if name.startswith("__") and name != "__all__":  # what Python itself asks of a module
        raise AttributeError(name)
    known = vars(_ours())
    if name not in known:
        raise AttributeError(f"kvjax.models has no name {name!r}, expected one of {', '.join(known['__all__'])}")
    return known[name]


def __dir__() -> list[str]:
    return list(vars(_ours())["__all__"])
