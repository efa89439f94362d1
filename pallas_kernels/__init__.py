"""Kernels that depend on JAX alone, in rooms by what they do: attend, score, choose, store, query, layer.

A folder of a room holds one operation, which has one public function of the folder's name; operations that serve one method
are in a folder of that method (``choose/pariskv/collision``). An operation has these files:

* ``__init__.py``: the public function, whose annotations say what it takes (`signature`), and the table of its
  implementations (`dispatch.Operation`);
* ``timed.py``: the shapes at which the operation is timed, which no kernel imports;
* ``reference.py``: plain JAX, the implementation "xla", which runs everywhere;
* ``pallas_triton.py``, ``pallas_mosaic_gpu.py``, ``jax_triton.py``, ``cudnn.py``, ``pallas_tpu.py``: implementations for a
  GPU or a TPU.

``from pallas_kernels import gather_attention`` finds the function in its room, and imports nothing before it is asked for.
``_triton``, ``_mosaic_gpu`` and ``_mosaic`` (of TPUs) hold what the bodies of several kernels share, ``formats`` the
layouts of data that several operations read.
"""

import importlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

ROOMS = ("attend", "score", "choose", "store", "query", "layer")


def operations() -> Iterator[tuple[str, str]]:
    """Yield the room of every operation, such as "choose" or "choose.pariskv", and its name; nothing of them is imported."""
    here = pathlib.Path(__file__).parent
    for room in ROOMS:
        for path in sorted((here / room).rglob("reference.py")):
            yield ".".join(path.parent.parent.relative_to(here).parts), path.parent.name


def __getattr__(name: str) -> Callable[..., Any]:
    """Import the public function of the operation ``name``."""
    for room, operation in operations():
        if operation == name:
            return getattr(importlib.import_module(f"{__name__}.{room}.{name}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the operations beside what is imported already."""
    return sorted({*globals(), *(name for _, name in operations())})
