"""Names of methods as their papers write them, for tables and figures, and their looks in figures."""

import re
import zlib
from collections.abc import Sequence
from typing import Any

from experiments.records.plotting import line_style
from kvjax import registry

# Papers whose method is `kvjax.wrappers.Prefill` at some knobs, by their names in `kvjax.wrappers.named.PATTERNS`.
_TITLES = {"minference": "MInference", "xattention": "XAttention", "flexprefill": "FlexPrefill", "blasst": "BLASST"}

# Methods that many figures have; each has a colour of its own, SOCKET the pale yellow. The others follow by name.
_FIRST = ("chess", "sentencekv", "tokenselect", "mosaickv", "pariskv", "quest", "socket", "snapkv", "retroinfer", "keydiff",
          "h2o", "shadowkv", "retrievalattention", "streamingllm")  # fmt: skip


def method_styles(labels: Sequence[str], *, points: bool = True) -> list[dict[str, Any]]:
    """Choose the looks of some settings of methods: a method has one colour everywhere, and dashes for settings."""
    order = list(dict.fromkeys([*_FIRST, *sorted(registry.builtin()), *sorted(registry.WRAPPERS)]))
    names, styles = [re.split("[(@_]", label)[0] for label in labels], []  # of settings and of timed variants
    for at, name in enumerate(names):
        index = order.index(name) if name in order else len(order) + zlib.crc32(name.encode()) % len(_FIRST)
        styles.append(line_style(index, names[:at].count(name), points=points))
    return styles


def method_title(label: str) -> str:
    """Write a method as its paper does: ``chess(ratios=...)`` is CHESS(ratios=...), and ``chess_fixed`` is CHESS (fixed).

    Names inside of a label are written so, too: ``twilight(chess)`` is Twilight(CHESS). Knobs and unknown names stay. A label
    may also be a timed variant: a method, an underscore and a word, or a method, an at sign and the cache's dtype.
    """
    base, at, dtype = label.partition("@")
    if at:
        return f"{method_title(base)} ({dtype})"
    name, underscore, variant = label.partition("_")
    if underscore and name in registry.known():
        return f"{method_title(name)} ({variant.replace('_', ' ')})"
    classes = registry.WRAPPERS | registry.classes()
    titles = {name: cls.TITLE or cls.__name__ for name, cls in classes.items()} | _TITLES
    return re.sub(r"(?<![\w.:])[a-z]\w*\b(?!=)", lambda match: titles.get(match[0], match[0]), label)
