"""The package's home for models: every name of the package ``models``, which has one decoder and readers of checkpoints.

``kvjax.models.load("builtin")`` is ``models.load("builtin")``. The two packages do not know each other; this module alone
imports ``models``, when a name is asked for, and says which file hides it if there is another module of that name.
"""

from __future__ import annotations

import functools
import pathlib
import types
from typing import Any


@functools.cache
def _ours() -> types.ModuleType:
    """Import the package ``models`` that lies beside kvjax.

    Raises:
        ImportError: another module has its name, or it is missing.
    """
    home = pathlib.Path(__file__).resolve().parents[2] / "models"
    try:
        import models as found
    except ModuleNotFoundError as error:
        if error.name != "models":
            raise
        raise ImportError(f"kvjax needs its own package 'models' in {home.parent}, but it is missing") from error
    except ImportError as error:
        raise ImportError(f"{_told(home, None)} ({error})") from error
    places = [pathlib.Path(place).resolve() for place in vars(found).get("__path__", ())]
    if home not in places:
        raise ImportError(_told(home, vars(found).get("__file__") or next(iter(places), None)))
    return found


def _told(home: pathlib.Path, other: Any) -> str:
    hidden = f"{other} hides it: rename that, or take its directory off the search path"
    return f"kvjax needs its own package 'models' in {home.parent}, but {hidden}"


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
