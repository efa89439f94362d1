"""kvjax: KV-cache methods for long-context decoding in pure functional JAX.

>>> cache = kvjax.prefill(params, tokens, config=config, method=kvjax.methods.Quest(budget=1024))
>>> out = kvjax.generate(params, cache, max_new_tokens=64)
"""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvjax.public import *  # noqa: F403  (its `__all__`)
else:  # hidden from type checkers, to which a `__getattr__` would give every misspelt name

    def __getattr__(name: str) -> Any:
        """Import a module of this package, or take a public name: `kvjax.public` and JAX are imported for the first one.

        ``import kvjax`` alone is quick, and so are ``python -m kvjax ls`` and ``--help``.
        """
        if name in _modules():
            return importlib.import_module(f"{__name__}.{name}")
        if not name.startswith("__") or name in ("__all__", "__version__"):
            public = importlib.import_module(f"{__name__}.public")
            if name == "__all__" or name in public.__all__:
                return vars(public)[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names, and the modules of this package."""
        return sorted({*_modules(), *importlib.import_module(f"{__name__}.public").__all__})


@functools.cache
def _modules() -> Collection[str]:
    return frozenset(module.name for module in pkgutil.iter_modules([os.path.dirname(__file__)]))
