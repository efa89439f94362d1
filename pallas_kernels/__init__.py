"""Kernels that depend on JAX alone, in rooms by what they do: attend, score, choose, store, query, layer.

A folder of a room holds one operation, which has one public function of the folder's name:

* ``__init__.py``: the public function, its checks, and the table of its implementations (`dispatch.Operation`);
* ``timed.py``: the shapes at which the operation is timed, which no kernel imports;
* ``reference.py``: plain JAX, the implementation "xla", which runs everywhere;
* ``pallas_triton.py``, ``jax_triton.py``, ``cudnn.py``, ``pallas_tpu.py``: implementations for a GPU or a TPU.

``from pallas_kernels import gather_attention`` finds the function in its room, and imports nothing before it is asked for.
``_triton`` and ``_mosaic`` hold what the bodies of several kernels share, ``formats`` the layouts of data that several
operations read.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

ROOMS = ("attend", "score", "choose", "store", "query", "layer")


def operations() -> Iterator[tuple[str, str]]:
    """Yield the room and the name of every operation; nothing of them is imported."""
    for room in ROOMS:
        spec = importlib.util.find_spec(f"{__name__}.{room}")
        places = None if spec is None else spec.submodule_search_locations
        yield from ((room, found.name) for found in pkgutil.iter_modules(places))


def __getattr__(name: str) -> Callable[..., Any]:
    """Import the public function of the operation ``name``."""
    for room, operation in operations():
        if operation == name:
            return getattr(importlib.import_module(f"{__name__}.{room}.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the operations beside what is imported already."""
    return sorted({*globals(), *(name for _, name in operations())})


class Moved(importlib.abc.MetaPathFinder):
    """Tells where a module of a package is now, once no other finder knows it.

    Args:
        package: the package's name. JAX tries hundreds of imports that fail while it lowers a kernel, so names of other
            packages must cost nothing.
        places: new names by old names. They are read when an import of this package fails.
    """

    def __init__(self, package: str, places: Callable[[], Mapping[str, str]]) -> None:
        self._prefix, self._places = f"{package}.", places

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Refuse a name that has moved.

        Raises:
            ModuleNotFoundError: the message has the new name.
        """
        if not name.startswith(self._prefix) or (new := self._places().get(name)) is None:
            return
        # Without the attribute `name`: `from package import old` swallows an error that has the module's name.
        raise ModuleNotFoundError(f"{name} has moved: import {new}")


# The last finder is asked only about modules that nobody has found: an import that succeeds never meets it.
sys.meta_path.append(
    Moved(__name__, lambda: {f"{__name__}.{name}": f"{__name__}.{room}.{name}" for room, name in operations()})
)
