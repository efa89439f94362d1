"""Names of methods as their papers write them, for tables and figures."""

from __future__ import annotations

from kvjax import registry


def method_title(label: str) -> str:
    """Write a method as its paper does: ``chess(ratios=...)`` is CHESS(ratios=...), and ``chess_fixed`` is CHESS (fixed).

    A label may also be a timed variant: a method, an underscore and a word, or a method, an at sign and the cache's dtype.
    """
    base, at, dtype = label.partition("@")
    if at:
        return f"{method_title(base)} ({dtype})"
    name, underscore, variant = label.partition("_")
    if underscore and name in registry.classes() | registry.WRAPPERS | registry.PATTERNS:
        return f"{registry.title(name)} ({variant.replace('_', ' ')})"
    return registry.title(label)
